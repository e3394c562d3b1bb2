#!/bin/sh
# An environment with the versions of a machine with a card (docs/gpu.md): Python 3.12, torch 2.11, triton 3.6,
# transformers 5.17.  The tests of `make test-all` run the GPU benchmarks and the kernels' tests in it, on the CPU.
#
#     bench/card_environment.sh DIR
#
# It differs from such a machine in two things, and says so: numpy is older than 2.4, because triton 3.6's interpreter
# converts arrays to numbers in a way that numpy 2.4 refuses; and Python is another one if there is no 3.12.
# psutil is left out, as on that machine.
set -eu

dir=${1:?usage: bench/card_environment.sh DIR}

usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null
}

# Of pyenv, whose python3.12 is not on the PATH unless it is the selected version.
installed=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 2>/dev/null | tail -n 1)
python=
for candidate in python3.12 "$installed" python3; do
    if [ -n "$candidate" ] && usable "$candidate"; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || { echo "card_environment.sh: no Python 3.10 to 3.13 with venv and pip found" >&2; exit 1; }

"$python" -m venv --clear "$dir"
install() {
    "$dir/bin/python" -m pip --disable-pip-version-check --quiet install "$@"
}
# torch's index has CPU builds, which save gigabytes; PyPI has the build for CUDA, which runs here, too.
install --retries 0 --no-deps --index-url https://download.pytorch.org/whl/cpu 'torch>=2.11,<2.12' 2>/dev/null ||
    echo "cannot reach the index of torch's CPU wheels; installing torch from PyPI"
install 'torch>=2.11,<2.12' 'triton>=3.6,<3.7' 'transformers>=5.17,<5.18' 'numpy>=2,<2.4' 'msgspec>=0.19' \
    'tokenizers>=0.22' 'safetensors>=0.5' 'jinja2>=3.1' 'llguidance>=1.3,<2' 'ahocorasick-rs>=1.0' 'xxhash>=3.4' \
    'pytest>=8.3,<9.2' 'pytest-xdist>=3.6' 'pytest-timeout>=2.3' 'pytest-asyncio>=0.25' 'hypothesis>=6.120'

"$dir/bin/python" - <<'END'
import platform
from importlib.metadata import version

names = ("torch", "triton", "transformers", "numpy", "msgspec")
print("made with Python", platform.python_version(), *(f"{name} {version(name)}" for name in names), sep=", ")
if platform.python_version_tuple()[:2] != ("3", "12"):
    print("not Python 3.12, which the machine with a card has: none was found here")
print("not numpy 2.5, which it has: triton 3.6's interpreter needs an older one than 2.4")
END
touch "$dir/card.stamp"
