"""How gateways find pods of Kubernetes by the names that the chart gives them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "pod_names.py"
APART = ["unshare", "--map-root-user", "--mount", "--net"]


def may_unshare() -> bool:
    """Whether this user can have namespaces of its own, and `ip` is there to start their network."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*APART, "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="no namespaces for this user, or no ip command (Debian: iproute2)")
@pytest.mark.parametrize(("policy", "old"), [("ordered", [[2], [3]]), ("round-robin", [[2, 3]])])
def test_a_headless_services_name_leads_to_its_pods_throughout_a_rollout(
    policy: str, old: list[list[int]], tmp_path: Path
) -> None:
    """Neither to the pod itself, which its hosts file has under the whole name, nor to pods that have gone."""
    ended = subprocess.run([*APART, sys.executable, SCRIPT, tmp_path, policy], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    before, after = json.loads(ended.stdout)
    assert before in old and after == [4]
