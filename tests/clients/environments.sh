#!/bin/sh
# The environments of tests/clients: two for Python, because some clients need version 2 of OpenAI's package and others
# version 3, and node_modules for JavaScript where there is Node.
#
#     tests/clients/environments.sh DIR
set -eu

dir=${1:?usage: tests/clients/environments.sh DIR}
here=$(dirname "$0")

for name in openai2 openai3; do
    "${PYTHON:-python3}" -m venv --clear "$dir/$name"
    # The file has every package that is needed: with --no-deps pip searches for no other versions.  Compiling all
    # modules would take longer than installing them.
    "$dir/$name/bin/python" -m pip --disable-pip-version-check --quiet install --no-compile --no-deps \
        -r "$here/python/$name.txt"
done

if command -v npm >/dev/null; then
    npm ci --prefix "$here/node" --no-audit --no-fund --silent
else
    echo "environments.sh: no npm found; the clients in JavaScript are skipped"
fi
touch "$dir/clients.stamp"
