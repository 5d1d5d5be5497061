# What the scenarios share; they source it, each as the first process of its namespaces: NAME WORK IMAGE CGROUP.
set -euo pipefail
shopt -s inherit_errexit

machine=${0##*/} work=$1 image=$2 cgroup=$3
here=$PWD/${0%/*}
dir=$work/$machine root=$work/$machine/disk/root
queue=/var/lib/agents/queue.jsonl textfiles=/var/lib/prometheus/node-exporter
prometheus=127.0.0.1:9090 node_exporter=127.0.0.1:9100
timers=(handoff-exporter.timer handoff-compact.timer handoff-offload.timer handoff-notify.timer)
touch "$dir/passed" "$dir/failed"

# step NAME FUNCTION: runs it with errors ending it, and says how it went. After a failure also what was said, by the machine too.
step() {
  local name=$1 function=$2 status began=$SECONDS since
  since=$(date +%s)
  set +e
  (
    set -eE
    trap 'echo "${BASH_SOURCE[0]##*/}:$LINENO: status $?: $BASH_COMMAND"' ERR
    "$function"
  ) >"$dir/said" 2>&1 </dev/null
  status=$?
  set -e
  if [ "$status" = 0 ]; then
    echo "$name" >>"$dir/passed"
    echo "ok      $machine: $name ($((SECONDS - began)) s)"
    return
  fi
  echo "$name" >>"$dir/failed"
  {
    echo "FAILED  $machine: $name ($((SECONDS - began)) s)"
    cut -c -500 "$dir/said"
    if on test -d /run/systemd/system; then
      echo "--- systemctl --failed"
      on systemctl --failed --no-legend
      echo "--- journal"
      on journalctl --no-pager --since "@$since" | grep -vE ' (CRON|prometheus-node-exporter)\[' | tail -n 60 | cut -c -300
    fi
    echo
  } >"$dir/report" 2>&1 || true
  cat "$dir/report"
}

# fail WHY
fail() {
  echo "$*"
  return 1
}

# is WHAT GOT EXPECTED
is() {
  [ "$2" = "$3" ] || fail "$1: '$2', expected '$3'"
}

# soon SECONDS COMMAND…: waits until it succeeds. (Errors don't end it inside: && what must hold together.)
soon() {
  local end=$((SECONDS + $1)) said
  shift
  until said=$("$@" 2>&1); do
    [ "$SECONDS" -lt "$end" ] || fail "not in time: $* $said"
    sleep 0.2
  done
}

# What changes on the disk stays in memory, and is bounded.
insert_disk() {
  mkdir "$dir/disk"
  mount -t tmpfs -o mode=755,size=1g tmpfs "$dir/disk"
  mkdir "$dir/disk/upper" "$dir/disk/work" "$root"
  mount -t overlay -o "lowerdir=$image,upperdir=$dir/disk/upper,workdir=$dir/disk/work" overlay "$root"
}

# boot PROGRAM ARGUMENT…: starts systemd-nspawn with the arguments, and waits for PROGRAM, which runs in the machine from then on.
boot() {
  local program=$1 nspawn
  shift
  (
    # So that two machines, and what they do to control groups, have nothing in common.
    for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/systemd /sys/fs/cgroup/unified; do
      if [ -e "$hierarchy/cgroup.procs" ]; then
        mkdir -p "$hierarchy/$cgroup"
        echo "$BASHPID" >"$hierarchy/$cgroup/cgroup.procs"
      fi
    done
    # The network is ours: the machine may give its units networks of their own.
    exec systemd-nspawn --quiet --register=no --keep-unit --resolv-conf=off --capability=CAP_NET_ADMIN --machine="$machine" --directory="$root" --console=pipe "$@"
  ) >"$dir/console" 2>&1 </dev/null &
  nspawn=$!
  soon 30 pgrep -x "$program" || { cat "$dir/console"; return 1; }
  pgrep -o -x "$program" >"$dir/leader"
  echo "$nspawn" >"$dir/nspawn"
}

# shut_down COMMAND…: runs it in the machine, and waits until that is off.
shut_down() {
  on "$@" || true
  soon 60 is_off
}
is_off() {
  ! kill -0 "$(<"$dir/nspawn")" 2>/dev/null
}

# on COMMAND…: runs it in the machine.
on() {
  nsenter --target "$(<"$dir/leader")" --all \
    env -i --chdir=/ PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive "$@"
}

# agents COMMAND…: runs it in the machine as its user, with the settings of the machine.
agents() {
  on runuser -u agents -- sh -c 'set -a; . /etc/default/handoff; exec "$@"' sh "$@"
}

# append LINE…: writes records as existing workers do, without these tools.
append() {
  printf '%s\n' "$@" | agents flock /var/lib/agents/queue.lock sh -c "cat >>$queue"
}

# record ID: the record, as it stands.
record() {
  jq -Rc --arg id "$1" 'fromjson? | select(.id == $id)' "$root$queue"
}
# in_queue ID CONDITION: whether a jq expression holds of it.
in_queue() {
  record "$1" | jq -e "$2" >/dev/null || fail "it is: $(record "$1")"
}

# apt ARGUMENT…: runs it in the machine. Neither it nor a script of the package may complain.
apt() {
  local status=0
  # Without what it shows and overwrites.
  on apt-get --yes --no-install-recommends -o Dpkg::Use-Pty=0 "$@" 2>&1 | sed 's/.*\r//' >"$dir/apt" || status=$?
  cat "$dir/apt"
  [ "$status" = 0 ] || fail "apt-get $*: status $status"
  ! grep -iE 'warning|error|fail|cannot|not found|no such|^[WE]:' "$dir/apt" || fail "apt-get $*: complains"
}

# An MTA as many servers have it: what it needs to deliver is closed to all but its group, which it gets by setgid.
set_up_mail() {
  mkfifo "$dir/sink"
  # Debian's own Python has Debian's aiosmtpd. It ends with its standard input, so never.
  /usr/bin/python3 tests/workers/smtp_sink.py "$dir/mails" <>"$dir/sink" >"$dir/sink.port" &
  touch "$dir/mails"
  soon 30 test -s "$dir/sink.port"
  printf 'account default\nhost 127.0.0.1\nport %s\nfrom agents@box.example\n' "$(<"$dir/sink.port")" >"$root/etc/msmtprc"
  chroot "$root" sh -c 'chgrp mail /etc/msmtprc /usr/bin/msmtp && chmod 640 /etc/msmtprc && chmod 2755 /usr/bin/msmtp'
}
mails() {
  wc -l <"$dir/mails"
}

# serves LINE: whether node_exporter serves a sample.
serves() {
  curl --silent --fail "http://$node_exporter/metrics" | grep -xF -- "$1" >/dev/null || fail "node_exporter does not serve: $1"
}

# query PROMQL: the values.
query() {
  curl --silent --fail --get --data-urlencode "query=$1" "http://$prometheus/api/v1/query" | jq -r '.data.result[].value[1]'
}
# gives PROMQL VALUE
gives() {
  local got
  got=$(query "$1") && is "$1" "$got" "$2"
}

start_prometheus() {
  cat >"$dir/prometheus.yml" <<END
global: {scrape_interval: 1s}
scrape_configs: [{job_name: node, static_configs: [{targets: ['$node_exporter']}]}]
END
  prometheus --config.file="$dir/prometheus.yml" --storage.tsdb.path="$dir/disk/prometheus" --web.listen-address="$prometheus" \
    >"$dir/prometheus.log" 2>&1 </dev/null &
}

ip link set lo up
insert_disk
