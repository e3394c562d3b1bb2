"""Build hooks: one compiles the CPU kernels into the package, for wheels and editable installs, and adds the demo to
wheels; one writes the URLs of the repository whose GitHub workflow builds the package into its metadata.

Without a compiler the install succeeds; the backend then reports at load what to install.
"""

from __future__ import annotations

import os
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":  # which finds the demo in the checkout
            for part in ("config.pbtxt", "1"):
                source = str(Path(self.root, "model_repository", "demo", part))
                build_data["force_include"][source] = f"inflight_tools/model_repository/demo/{part}"
        # Run by path: importing the package would need torch.
        script = Path(self.root, "backend", "inflight", "kernels", "cpu", "build.py")
        kernel = runpy.run_path(str(script), run_name="kernel_build")
        try:
            library: Path = kernel["build"]()
        except kernel["BuildError"] as error:
            self.app.display_warning(f"inflight: installing without the CPU kernels: {error}")
            return
        build_data["artifacts"].append(f"/{library.relative_to(Path(self.root).resolve()).as_posix()}")
        if version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


class RepositoryUrls(MetadataHookInterface):
    """A fork's wheels name the fork; wheels that are built elsewhere name none."""

    def update(self, metadata: dict[str, Any]) -> None:
        server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
        metadata["urls"] = {}
        if server and repository:
            home, version = f"{server}/{repository}", f"v{metadata['version']}"
            metadata["urls"] = {
                "Repository": home,
                "Documentation": f"{home}/tree/{version}/docs",
                "Changelog": f"{home}/blob/{version}/CHANGELOG.md",
                "Issues": f"{home}/issues",
            }
