#!/usr/bin/env bash
# A CA of one's own for a test or a closed cluster, and certificates of it.
#
#   bash scripts/make_certs.sh [--days=N] [--name=NAME] DIR [HOST ...]
#
# DIR/ca.pem and ca.key are made once; NAME.pem and NAME.key (default: node)
# are for the given hosts (names or IP addresses; default: localhost and
# 127.0.0.1) and serve both as a server's and as a caller's. --days=-1 makes one
# that has expired. Keep ca.key away from the machines of the run.
set -euo pipefail

days=30
name=node
while [[ "${1:-}" == --* ]]; do
  case "$1" in
    --days=*) days="${1#*=}" ;;
    --name=*) name="${1#*=}" ;;
    --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "unknown flag $1; see --help" >&2; exit 2 ;;
  esac
  shift
done
if [[ $# -lt 1 ]]; then
  echo "DIR is missing; see --help" >&2
  exit 2
fi
dir="$1"
shift
hosts=("$@")
[[ ${#hosts[@]} -gt 0 ]] || hosts=(localhost 127.0.0.1)

umask 077
mkdir -p "$dir"
new_key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }

if [[ ! -e "$dir/ca.pem" ]]; then
  new_key "$dir/ca.key"
  openssl req -x509 -new -key "$dir/ca.key" -sha256 -days 3650 \
    -subj "/CN=ddiloco test CA" -out "$dir/ca.pem" \
    -addext "basicConstraints=critical,CA:TRUE" \
    -addext "keyUsage=critical,keyCertSign,cRLSign"
fi

names=""
for host in "${hosts[@]}"; do
  if [[ "$host" =~ ^[0-9.]+$ || "$host" == *:* ]]; then
    names+=",IP:$host"
  elif [[ "$host" =~ ^[A-Za-z0-9*]([A-Za-z0-9.-]*[A-Za-z0-9])?$ ]]; then
    names+=",DNS:$host"
  else
    echo "HOST '$host' is no host: it is a name, such as node-1.example, or an" \
      "IP address" >&2
    exit 2
  fi
done

new_key "$dir/$name.key"
openssl req -new -key "$dir/$name.key" -subj "/CN=$name" -out "$dir/$name.csr"
cat > "$dir/$name.ext" <<EXT
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=serverAuth,clientAuth
subjectAltName=${names#,}
EXT
# x509 takes no past dates before OpenSSL 3.4, and ca does.
mkdir -p "$dir/.ca"
: > "$dir/.ca/index.txt"
cat > "$dir/.ca/ca.cnf" <<CNF
[ca]
default_ca = own
[own]
new_certs_dir = $dir/.ca
database = $dir/.ca/index.txt
rand_serial = yes
default_md = sha256
policy = any
[any]
commonName = supplied
CNF
stamp() { date -u -d "@$(($(date +%s) + $1))" +%Y%m%d%H%M%SZ; }
openssl ca -batch -notext -config "$dir/.ca/ca.cnf" \
  -cert "$dir/ca.pem" -keyfile "$dir/ca.key" \
  -startdate "$(stamp $((-172800)))" -enddate "$(stamp $((days * 86400)))" \
  -in "$dir/$name.csr" -extfile "$dir/$name.ext" -out "$dir/$name.pem" \
  2> "$dir/.ca/log" || { cat "$dir/.ca/log" >&2; exit 1; }
rm -r "$dir/.ca" "$dir/$name.csr" "$dir/$name.ext"
echo "$dir/$name.pem: ${names#,}, good for $days days"
