#!/usr/bin/env bash
# Takes prometheus, promtool and the exporters out of the images that compose.services.yaml names, so that tests can run
# them as processes: binaries.sh FOLDER
set -euo pipefail
folder=${1:?usage: binaries.sh FOLDER}
cd "$(dirname "$0")/../.."
mkdir -p "$folder"

take() { # NAME REPOSITORY PATH_IN_IMAGE...
  local name=$1 repository=$2 image container path
  shift 2
  [ -x "$folder/$name" ] && return
  image=$(grep -o "$repository:[^ ]*" compose.services.yaml | head -n 1)
  container=$(docker create "$image" none)
  for path in "$@"; do
    if docker cp -L "$container:$path" "$folder/$name" >/dev/null 2>&1; then break; fi
  done
  docker rm "$container" >/dev/null
  [ -x "$folder/$name" ] || { echo "binaries: no $name in $image" >&2; exit 1; }
}

take prometheus prom/prometheus /bin/prometheus
take promtool prom/prometheus /bin/promtool
take alertmanager prom/alertmanager /bin/alertmanager
take redis_exporter oliver006/redis_exporter /redis_exporter /usr/bin/prometheus-redis-exporter
take node_exporter prom/node-exporter /bin/node_exporter /usr/bin/prometheus-node-exporter
