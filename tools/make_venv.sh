#!/usr/bin/env bash
# Make the virtual environment $1 with the locked packages and this project in it (editable).
set -euo pipefail

venv=${1:?usage: make_venv.sh DIRECTORY}

new_enough='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))'

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
        if [ -n "$candidate" ] && "$candidate" -c "$new_enough" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: no Python 3.11 or newer found." >&2
    echo "  Debian, Ubuntu: sudo apt-get install python3 python3-venv" >&2
    echo "  macOS:          brew install python@3.13" >&2
    echo "  elsewhere:      https://www.python.org/downloads/ ; or name it: make setup PYTHON=/path/to/python3" >&2
    exit 1
}

if ! "$venv/bin/python" -c "$new_enough" 2>/dev/null; then
    python=$(find_python)
    echo "setup: making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null

echo "setup: installing the locked packages (about a minute the first time)"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
# Nothing is added to what the locks name, and each file is compared with its hash. What comes as source is
# built with the build tools of requirements-build.lock: an isolated build would fetch the newest ones.
"${pip[@]}" --no-deps --require-hashes --only-binary :all: -r requirements-build.lock
packages=(--no-deps --no-build-isolation)
for package in . packages/oncelog-devtools packages/oncelog-simulator packages/oncelog-demo packages/oncelog-bench; do
    packages+=(--editable "$package")
done
# uv takes a quarter of pip's processor time. It does not read pip's configuration, such as an index of a company's
# own: where it fails, pip installs the same files.
uv=("$venv/bin/uv" --no-config pip install --quiet --python "$venv/bin/python")
locked=(--no-deps --require-hashes --no-build-isolation -r requirements.lock)
if ! { "${uv[@]}" --compile-bytecode "${locked[@]}" && "${uv[@]}" "${packages[@]}"; }; then
    echo "setup: uv could not install the packages, so pip does"
    "${pip[@]}" "${locked[@]}"
    "${pip[@]}" "${packages[@]}"
fi
echo "setup: done; $venv/bin/oncelog --help"
