#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A systemd that is process 1 of its own namespaces, on a copy of this system that vanishes with it.
# For tests of what only a service manager does; nothing outside is changed, but for a cgroup that
# `clean` takes away.
#
#   systemd_root.sh boot FOLDER    does not return; end it by SIGKILL, and all within ends with it
#   systemd_root.sh clean FOLDER   the cgroup and the folder, once that has ended
#
# Needs root, namespaces, overlayfs and a cgroup hierarchy of version 2 that may be mounted. The
# root is an overlay: this system below, a tmpfs above. KVM_ROOT_BINDS names folders, with ':'
# between, that are to be seen in it at their own paths, to be read.
set -euo pipefail

command="$1"
base="$2"
self="$(readlink -f "${BASH_SOURCE[0]}")"

# In a mount namespace of its own: the path of the cgroup, below this process's own one.
mount_cgroups() {
  local own
  own="$(sed -n 's/^0:://p' /proc/self/cgroup)"
  [[ -n "$own" && "$own" != /..* ]] || { echo 'no cgroup of version 2' >&2; exit 1; }
  mkdir -p "$base/cgroup"
  mount -t cgroup2 cgroup2 "$base/cgroup"
  group="$base/cgroup$own/kvm-test-$(basename "$base")"
}

case "$command" in
  boot)
    # 1. Mounts that nobody else sees, and a cgroup for all that follows.
    exec unshare --mount --propagation private "$self" boot-mounts "$base"
    ;;
  boot-mounts)
    mount_cgroups
    mkdir -p "$group"
    echo $$ >"$group/cgroup.procs"
    # 2. Everything else of its own. What dies with this shell's pid ends process 1, and so all.
    exec unshare --fork --kill-child --mount --pid --cgroup --ipc --uts --net \
      "$self" boot-root "$base"
    ;;
  boot-root)
    # 3. The root.
    mount -t tmpfs -o mode=755 tmpfs "$base"
    mkdir "$base/upper" "$base/work" "$base/root"
    root="$base/root"
    mount -t overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" overlay "$root"
    mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
    mount --bind "$root/proc/sys" "$root/proc/sys"
    mount -o remount,bind,ro,nosuid,nodev,noexec "$root/proc/sys"
    mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
    mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"
    mount -t tmpfs -o mode=755,nosuid tmpfs "$root/dev"
    for device in null zero full random urandom tty; do
      touch "$root/dev/$device"
      mount --bind "/dev/$device" "$root/dev/$device"
    done
    ln -s /proc/self/fd "$root/dev/fd"
    # What PrivateDevices= of a unit copies.
    mkdir "$root/dev/pts" "$root/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
    ln -s pts/ptmx "$root/dev/ptmx"
    mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/dev/shm"
    mount -t tmpfs -o mode=755,nosuid,nodev tmpfs "$root/run"
    mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/tmp"
    IFS=: read -ra binds <<<"${KVM_ROOT_BINDS:-}"
    for path in "${binds[@]}"; do
      mkdir -p "$root$path"
      mount --bind "$path" "$root$path"
      mount -o remount,bind,ro "$root$path"
    done
    # Nothing of this system is started, but for the journal. Least of all systemd-tmpfiles, which
    # empties /tmp.
    : >"$root/etc/fstab"
    : >"$root/etc/machine-id"
    units="$root/etc/systemd/system"
    rm -rf "$units"
    mkdir -p "$units"
    shipped="$root/lib/systemd/system"
    for unit in "$shipped"/{sysinit,sockets,timers,local-fs}.target.wants/*; do
      case "$(basename "$unit")" in
        systemd-journald.* | systemd-journald-dev-log.*) ;;
        '*') ;;
        *) ln -sf /dev/null "$units/$(basename "$unit")" ;;
      esac
    done
    cd "$root"
    mkdir -p .outside
    pivot_root . .outside
    umount -l /.outside
    # 4. Process 1.
    systemd=/lib/systemd/systemd
    exec env -i container=kvm-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
      "$systemd" --unit=basic.target --show-status=no --log-target=journal
    ;;
  clean)
    [[ ! -d "$base" ]] || exec unshare --mount --propagation private "$self" clean-mounts "$base"
    ;;
  clean-mounts)
    mount_cgroups
    [[ ! -d "$group" ]] || find "$group" -depth -type d -exec rmdir {} +
    umount "$base/cgroup"
    rmdir "$base/cgroup" "$base"
    ;;
  *)
    echo "no command '$command'" >&2
    exit 2
    ;;
esac
