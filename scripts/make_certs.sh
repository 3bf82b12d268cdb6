#!/usr/bin/env bash
# A CA of one's own for a test or a closed cluster, and certificates of it.
#
#   bash scripts/make_certs.sh [--days=N] [--name=NAME] DIR [HOST ...]
#
# DIR/ca.pem and ca.key are made once; NAME.pem and NAME.key (default: node)
# are for the given hosts (names or IP addresses; default: localhost and
# 127.0.0.1) and serve both as a server's and as a caller's. Once more, they are
# renewed; if that fails, the old ones stay. --days=-1 makes one that has
# expired. Keep ca.key away from the machines of the run.
set -euo pipefail
export LC_ALL=C # A letter is an ASCII letter.

refuse() { echo "$*" >&2; exit 2; }

days=30
name=node
while [[ "${1:-}" == --* ]]; do
  case "$1" in
    --days=*) days="${1#*=}" ;;
    --name=*) name="${1#*=}" ;;
    --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) refuse "unknown flag $1; see --help" ;;
  esac
  shift
done
[[ -n "${1:-}" ]] || refuse "DIR is missing; see --help"
dir="$1"
shift
hosts=("$@")
[[ ${#hosts[@]} -gt 0 ]] || hosts=(localhost 127.0.0.1)

is_ipv4() {
  local byte="(0|[1-9][0-9]?|1[0-9][0-9]|2[0-4][0-9]|25[0-5])"
  [[ "$1" =~ ^$byte\.$byte\.$byte\.$byte$ ]]
}
is_ipv6() {
  local group="[0-9A-Fa-f]{1,4}" groups
  local some="($group(:$group)*)?"
  [[ "$1" =~ ^$group(:$group){7}$ ]] && return
  [[ "$1" =~ ^$some::$some$ ]] || return
  groups=(${1//:/ })
  [[ ${#groups[@]} -le 7 ]]
}
is_name() {
  local label="[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
  [[ "$1" =~ ^(\*\.)?$label(\.$label)*$ && ${#1} -le 253 &&
    "$1" =~ [A-Za-z-] ]] # Else an IP address that is none.
}

[[ "$days" =~ ^-?(0|[1-9][0-9]{0,3})$ ]] && ((-3650 <= days && days <= 3650)) ||
  refuse "--days=$days is no number of days: give a whole number between" \
    "-3650 and 3650, such as 30"
[[ "$name" =~ ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$ ]] ||
  refuse "--name=$name cannot be a file's name: give 1 to 64 letters, digits," \
    "'.', '_' or '-', with a letter or digit first, such as node-1"
[[ "$name" != [cC][aA] ]] ||
  refuse "--name=$name is the CA's own: give another one, such as node"
alternatives=""
for host in "${hosts[@]}"; do
  if is_ipv4 "$host" || is_ipv6 "$host"; then
    alternatives+=",IP:$host"
  elif is_name "$host"; then
    alternatives+=",DNS:$host"
  else
    refuse "HOST '$host' is no host: give a name, such as node-1.example, or" \
      "an IP address, such as 10.0.0.1"
  fi
done
for tool in openssl python3; do
  command -v "$tool" > /dev/null ||
    refuse "there is no command '$tool' here: install it"
done

umask 077
[[ ! -e "$dir" || -d "$dir" ]] ||
  refuse "DIR '$dir' is a file: give a directory, which is made if need be"
mkdir -p -- "$dir"
for file in ca.pem ca.key "$name.pem" "$name.key"; do
  [[ ! -d "$dir/$file" ]] ||
    refuse "$dir/$file is a directory, and a file is to be there: remove it"
done
exec 9< "$dir"
# One at a time: they share the CA, and NAME may be the same. Python's, since
# flock(1) is Linux's; the lock is this shell's too, and ends with it.
python3 -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
work="$(mktemp -d -- "$dir/.new.XXXXXX")"
trap 'rm -rf -- "$work"' EXIT

new_key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }
put() { mv -f -- "$work/$1" "$dir/$1"; }

if [[ ! -e "$dir/ca.pem" ]]; then
  if [[ ! -e "$dir/ca.key" ]]; then
    new_key "$work/ca.key"
    put ca.key
  fi
  openssl req -x509 -new -key "$dir/ca.key" -sha256 -days 3650 \
    -subj "/CN=ddiloco test CA" -out "$work/ca.pem" \
    -addext "basicConstraints=critical,CA:TRUE" \
    -addext "keyUsage=critical,keyCertSign,cRLSign"
  put ca.pem
fi
[[ -e "$dir/ca.key" ]] ||
  refuse "$dir/ca.key is not there, and only it can sign for $dir/ca.pem: put" \
    "it back, or give another DIR, for a new CA"

new_key "$work/$name.key"
openssl req -new -key "$work/$name.key" -subj "/CN=$name" -out "$work/csr"
cat > "$work/ext" << EXT
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=serverAuth,clientAuth
subjectAltName=${alternatives#,}
EXT
: > "$work/index.txt"
cat > "$work/cnf" << 'CNF'
[ca]
default_ca = own
[own]
new_certs_dir = .
database = index.txt
rand_serial = yes
default_md = sha256
policy = any
[any]
commonName = supplied
CNF
stamp() { # In N days.
  python3 -c 'import sys, time
at = time.time() + 86400 * int(sys.argv[1])
print(time.strftime("%Y%m%d%H%M%SZ", time.gmtime(at)))' "$1"
}
ca="$(cd -- "$dir" > /dev/null && pwd)"
start=$((days < 0 ? days - 1 : -2))
# x509 takes no past dates before OpenSSL 3.4, and ca does.
(
  cd -- "$work" > /dev/null
  openssl ca -batch -notext -config cnf -cert "$ca/ca.pem" \
    -keyfile "$ca/ca.key" -startdate "$(stamp "$start")" \
    -enddate "$(stamp "$days")" -in csr -extfile ext -out "$name.pem" 2> log
) || {
  cat "$work/log" >&2
  echo "no certificate was made; what was in $dir is as it was" >&2
  exit 1
}
put "$name.key"
put "$name.pem"
echo "$dir/$name.pem: ${alternatives#,}, good for $days days"
