#!/usr/bin/env bash
# Builds the oracle environment .oracle/: torch (CPU) and transformers, apart from the engine's own.
#
#   tests/oracle/setup.sh              Python 3.11, for which torch has a small CPU build here
#   ORACLE_DOWNLOAD=1 ... setup.sh     any Python >= 3.10; torch may be a download of several GB
#   ORACLE_PYTHON=/path/to/python      takes this interpreter instead of looking for one
#
# Exit code 0: .oracle is ready. 3: there is no suitable Python and no leave to download; the last
# line says why. Anything else: the build failed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=$root/.oracle
stamp=$venv/ready
# The parity limits were measured with these; a newer transformers is welcome, an older one has
# known errors in this model.
packages=("torch==2.13.0" "transformers>=5.24,<6" "safetensors>=0.6" "numpy>=2.0")

usable() { # usable PYTHON CONDITION: it starts, can build environments, and satisfies CONDITION
  "$1" -c "import ensurepip, sys, venv; sys.exit(not ($2))" >/dev/null 2>&1
}

candidates() { # every place where an interpreter of minor version $1 may be
  printf '%s\n' "$HOME"/.pyenv/versions/3."$1".*/bin/python3 "python3.$1" "/usr/bin/python3.$1"
  if command -v uv >/dev/null; then uv python find "3.$1" 2>/dev/null || true; fi
}

find_python() { # find_python MINOR...
  local minor python
  for minor in "$@"; do
    while IFS= read -r python; do
      if usable "$python" "sys.version_info[:2] == (3, $minor)"; then
        echo "$python"
        return 0
      fi
    done < <(candidates "$minor")
  done
  return 1
}

if [[ -n "${ORACLE_PYTHON:-}" ]]; then
  python=$ORACLE_PYTHON
  if ! usable "$python" "sys.version_info >= (3, 10)"; then
    echo "oracle: ORACLE_PYTHON=$python is no Python >= 3.10 with venv and ensurepip" >&2
    exit 1
  fi
elif python=$(find_python 11); then
  :
elif [[ "${ORACLE_DOWNLOAD:-0}" == 1 ]]; then
  if ! python=$(find_python 12 13 10 14); then
    echo "oracle: no Python 3.10 to 3.14 with venv and ensurepip was found" >&2
    exit 3
  fi
else
  echo "oracle: no Python 3.11 with venv and ensurepip was found; for another Python torch is a" \
    "download of several GB: ORACLE_DOWNLOAD=1 make oracle" >&2
  exit 3
fi

wanted="$("$python" -c 'import sys; print(sys.version)') ${packages[*]}"
if [[ -f $stamp && "$(cat "$stamp")" == "$wanted" ]]; then
  echo "oracle: $venv is ready"
  exit 0
fi

echo "oracle: building $venv with $python" >&2
rm -rf "$venv"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check "${packages[@]}"
"$venv/bin/python" -c 'import torch, transformers; print("oracle: torch", torch.__version__, "transformers", transformers.__version__)'
printf '%s' "$wanted" >"$stamp"
