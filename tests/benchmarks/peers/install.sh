#!/usr/bin/env bash
# Makes an environment for each peer under var/peers; one that is there is kept.
set -euo pipefail
cd "$(dirname "$0")"
folder=../../../var/peers

install() { # NAME PACKAGE...
  local name=$1
  shift
  [ -e "$folder/$name/done" ] && return
  python3 -m venv "$folder/$name"
  "$folder/$name/bin/pip" install --quiet --requirement "$name.txt"
  "$folder/$name/bin/pip" install --quiet --no-deps "$@"
  touch "$folder/$name/done"
}
install specforge specforge==0.2.0
install speculators speculators==0.9.0 hs-connectors==0.9.0
