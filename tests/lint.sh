#!/usr/bin/env bash
# Every linter of the project; each package is type-checked in its own image's environment.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=.envs/tests/bin

$tools/ruff check .
$tools/ruff format --check .

check_types() { # ENVIRONMENT PACKAGE...
  local environment=$1
  shift
  $tools/mypy --python-executable ".envs/$environment/bin/python" --cache-dir ".mypy_cache/$environment" "$@"
}
check_types trainer dflash services/trainer
check_types tokenizer services/chat.py services/prompts services/tokenizer
check_types producer services/producer services/metrics
# services/chat.py needs a tokenizer and is checked above.
mapfile -t shared < <(git ls-files ':(glob)services/*.py' ':!services/chat.py')
check_types stack "${shared[@]}" services/metrics services/stack monitoring images/*.py images/sglang/toolkit.py \
  images/sglang/doctor images/sglang/cpu/serve.py

# A lock moves torch or CUDA only together with versions.toml.
python3 images/check_locks.py

PYTHONPATH=. $tools/lint-imports
git ls-files '*.sh' | xargs -r $tools/shellcheck
$tools/shellcheck .ci/run
git ls-files 'images/*/Dockerfile' | xargs -r $tools/hadolint

# dclint comes by npm and not by pip.
if ! command -v npm >/dev/null; then
  echo "no npm: dclint is left out" >&2
  exit 0
fi
dclint=.envs/dclint
if ! cmp --quiet tests/dclint/package-lock.json $dclint/made-from.json; then
  mkdir -p $dclint
  cp tests/dclint/package.json tests/dclint/package-lock.json $dclint
  if ! npm ci --prefix $dclint --ignore-scripts --no-audit --no-fund --loglevel=error 2>$dclint/npm.log; then
    cat $dclint/npm.log >&2
    # A lock that does not fit, or packages that are not the locked ones: a fault of this checkout or worse.
    if grep -qE 'EUSAGE|EINTEGRITY|EJSONPARSE|ETARGET' $dclint/npm.log; then
      exit 1
    fi
    echo "dclint could not be fetched: it is left out" >&2
    exit 0
  fi
  cp tests/dclint/package-lock.json $dclint/made-from.json
fi
$dclint/node_modules/.bin/dclint --config tests/dclint/rules.yaml --max-warnings 0 compose*.yaml tests/stack/fake_server.yaml \
  tests/stack/miniature
