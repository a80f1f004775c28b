#!/usr/bin/env bash
# Builds container/Containerfile on a Debian of its own, and runs the README's two commands in it: one
# process, and torchrun with two. Needs Debian or Ubuntu and root; CPU only.
#
#   scripts/container_check.sh
#
# FOLDER   for the images, 25 GB (default: a new one, removed at the end)
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD

cannot() {
    echo "error: the container cannot be checked here: $*" >&2
    exit 1
}

[ "$(id -u)" = 0 ] || cannot "root is needed; try: sudo $0"
missing=""
for program in mmdebstrap buildah ch-run; do
    command -v $program >/dev/null || missing="$missing $program"
done
if [ -n "$missing" ]; then
    command -v apt-get >/dev/null || cannot "not installed:$missing"
    echo "== installing mmdebstrap, buildah and charliecloud"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        mmdebstrap buildah charliecloud >/dev/null || cannot "apt-get does not find them"
fi

folder=${FOLDER:-$(mktemp -d)}
mkdir -p "$folder"
store=(buildah --root "$folder/store" --runroot "$folder/run" --storage-driver vfs)
container=""
finish() {
    [ -z "$container" ] || "${store[@]}" rm "$container" >/dev/null 2>&1 || true
    [ -n "${FOLDER:-}" ] || rm -rf "$folder"
}
trap finish EXIT
say() { echo "== $* (${SECONDS} s)"; }

base=$folder/base
if [ ! -e "$base" ]; then
    say "a Debian with Python"
    mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-pip,libgomp1 \
        bookworm "$base.part"
    mv "$base.part" "$base"
fi
say "the base image: $(du -sh "$base" | cut -f1)"
container=$("${store[@]}" from scratch)
"${store[@]}" add --quiet "$container" "$base" / >/dev/null
"${store[@]}" commit --quiet "$container" base >/dev/null
"${store[@]}" rm "$container" >/dev/null
container=""

# pip's settings of this machine, and its certificates, are no part of the image
mounts=(--volume /etc/ssl/certs:/etc/ssl/certs:ro)
if [ -e /etc/pip.conf ]; then mounts+=(--volume /etc/pip.conf:/etc/pip.conf:ro); fi
say "building container/Containerfile"
"${store[@]}" bud --quiet --isolation chroot --network host "${mounts[@]}" --build-arg BASE=base \
    -f container/Containerfile -t hybridtrain "$root" >"$folder/build.log" 2>&1 ||
    { tail -n 30 "$folder/build.log" >&2; exit 1; }
container=$("${store[@]}" from hybridtrain)
image=$("${store[@]}" mount "$container")
say "the image: $(du -sh "$image" | cut -f1)"

export USER=${USER:-root} # ch-run asks for it
mkdir -p "$folder/work"
run() {
    ch-run --unset-env='*' --set-env=PATH=/usr/local/bin:/usr/bin:/bin --set-env=HOME=/tmp \
        --set-env=OMP_NUM_THREADS=1 --bind "$folder/work:/work" --cd /work \
        "$image" -- "$@"
}
options=(world.devices=cpu trainer.epochs=2 monitor.progress=false)
say "hybridtrain recipe=digits ${options[*]}"
run hybridtrain recipe=digits "${options[@]}"
say "torchrun --standalone --nproc-per-node 2 -m hybridtrain recipe=digits run_name=two"
run torchrun --standalone --nproc-per-node 2 -m hybridtrain recipe=digits run_name=two "${options[@]}"
for name in digits two; do
    [ -s "$folder/work/outputs/$name/summary.json" ] || cannot "outputs/$name is not complete"
done
say "both commands have run in the container"
