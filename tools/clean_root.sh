#!/usr/bin/env bash
# Runs make targets (by default demo and test) on a clone of this repository inside a minimal Debian root that has
# only git, make, Python with venv, and apt. Needs root. KEEP=1 leaves the root behind.
set -euo pipefail

repository=$(cd "$(dirname "$0")/.." && pwd)
targets=("${@:-demo test}")
suite=${SUITE:-bookworm}  # has PostgreSQL 15
mirror=${MIRROR:-http://deb.debian.org/debian}
packages=(git make python3 python3-venv)
bundle=/etc/ssl/certs/ca-certificates.crt

base=$(mktemp -d /var/tmp/awa-root.XXXXXX)
root=$base/root

clean_up() {
    for folder in dev proc; do
        if mountpoint -q "$root/$folder"; then umount -R "$root/$folder"; fi
    done
    if [ -z "${KEEP:-}" ]; then rm -rf --one-file-system "$base"; else echo "kept $root" >&2; fi
}
trap clean_up EXIT

if ! command -v debootstrap >/dev/null; then
    apt-get -q update >&2
    apt-get -q install -y --no-install-recommends debootstrap >&2
fi
debootstrap --variant=minbase "$suite" "$root" "$mirror" >&2

# What this host needs to reach its package sources, and nothing else of it.
cp /etc/resolv.conf /etc/hosts "$root/etc/"
for file in /etc/pip.conf $(grep -lsiE '^ *Acquire::(http|https|Check)' /etc/apt/apt.conf /etc/apt/apt.conf.d/*); do
    if [ -e "$file" ]; then cp "$file" "$root$file"; fi
done
environment=(HOME=/root LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive
    SSL_CERT_FILE=$bundle PIP_CERT=$bundle)
while IFS= read -r line; do
    environment+=("$line")
done < <(env | grep -E '^(PIP_INDEX_URL|PIP_EXTRA_INDEX_URL|PIP_DEFAULT_TIMEOUT|(https?|no)_proxy|(HTTPS?|NO)_PROXY)=')

mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --make-rslave "$root/dev"

inside() { chroot "$root" env -i "${environment[@]}" "$@"; }

inside apt-get -q update >&2
inside apt-get -q install -y --no-install-recommends "${packages[@]}" >&2
mkdir -p "$root/etc/ssl/certs"
cp "$bundle" "$root$bundle"  # after the packages, one of which writes Debian's own
git clone --quiet --no-hardlinks "$repository" "$root/root/awa"
for target in ${targets[*]}; do
    echo "clean root: make $target" >&2
    inside make -C /root/awa "$target"
done
echo "clean root: ok"
