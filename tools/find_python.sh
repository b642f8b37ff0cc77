#!/bin/sh
# Prints a Python >= 3.12 that can make virtual environments, or says what to install.
#
# Looked at, in this order: $PYTHON, names on PATH, the versions of pyenv, uv.

usable() {
    [ -n "$1" ] && "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' \
        >/dev/null 2>&1
}

if [ -n "$PYTHON" ]; then
    usable "$PYTHON" && { echo "$PYTHON"; exit 0; }
    echo "PYTHON=$PYTHON is not a Python >= 3.12 with the modules venv and ensurepip" >&2
    exit 1
fi

for name in python3.12 python3.13 python3.14 python3 python; do
    candidate=$(command -v "$name" 2>/dev/null) || continue
    usable "$candidate" && { echo "$candidate"; exit 0; }
done

for minor in 12 13 14; do
    for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.$minor.*/bin/python3; do
        usable "$candidate" && { echo "$candidate"; exit 0; }
    done
done

if command -v uv >/dev/null 2>&1; then
    candidate=$(uv python find '>=3.12' 2>/dev/null)
    usable "$candidate" && { echo "$candidate"; exit 0; }
    echo 'uv fetches Python 3.12' >&2
    uv python install --quiet 3.12 >&2 && candidate=$(uv python find '>=3.12' 2>/dev/null)
    usable "$candidate" && { echo "$candidate"; exit 0; }
fi

cat >&2 <<'END'
ds4jax needs Python >= 3.12 and none was found (looked at PATH, pyenv and uv). Install one of:
  Debian, Ubuntu   apt install python3.12 python3.12-venv
  pyenv            pyenv install 3.12
  uv               uv python install 3.12
or name one: make PYTHON=/path/to/python3.12 ...
END
exit 1
