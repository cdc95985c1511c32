#!/usr/bin/env bash
# usage: k8s_build.sh FOLDER
# Builds a real kube-apiserver, -controller-manager and -scheduler (1.20.2) from Debian 12's source package into one
# program, FOLDER/kube-apiserver with two links beside it. Needs apt with Debian 12's archive, golang-go, patch and
# xz-utils; about 2 GB of scratch below FOLDER while it runs. Without the cloud providers (tag `providerless`), and with
# the OpenAPI definitions generated first, as the project's own makefile does it. Returns at once where it was done.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
[ -x "$out/kube-apiserver" ] && [ -e "$out/kube-scheduler" ] && exit 0
exec 9> "$out/.lock"
flock 9
[ -x "$out/kube-apiserver" ] && [ -e "$out/kube-scheduler" ] && exit 0
work=$(mktemp -d "$out/.build.XXXXXX")
trap 'chmod -R u+w "$work" 2> /dev/null || true; rm -rf "$work"' EXIT
cd "$work"

# The archive that this machine's apt already uses, asked for sources, in a scratch configuration.
mkdir -p apt/lists apt/cache apt/parts
for file in /etc/apt/sources.list.d/*.sources; do
  [ -e "$file" ] && sed 's/^Types:.*/Types: deb-src/' "$file" > "apt/parts/$(basename "$file")"
done
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
  [ -e "$file" ] && sed -n 's/^deb /deb-src /p' "$file" > "apt/parts/$(basename "$file" .list).list"
done
apt=(apt-get -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/apt/parts"
  -o "Dir::State::lists=$work/apt/lists" -o "Dir::Cache=$work/apt/cache" -o APT::Sandbox::User=root)
"${apt[@]}" update -qq
"${apt[@]}" source --download-only -qq kubernetes

source=go/src/k8s.io/kubernetes
mkdir -p "$source" home
tar xzf kubernetes_*.orig.tar.gz -C "$source" --strip-components=1
tar xJf kubernetes_*.debian.tar.xz
while read -r patch; do patch -d "$source" -p1 -s < "debian/patches/$patch"; done < debian/patches/series
mkdir "$source/cmd/testplane"
cp "$here/k8s_main.go" "$source/cmd/testplane/main.go"

cd "$source"
export GO111MODULE=off GOPATH="$work/go" GOFLAGS= CGO_ENABLED=0 GOCACHE="$work/cache" HOME="$work/home" GOTOOLCHAIN=local
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
packages=$(grep -rl --include='*.go' '+k8s:openapi-gen=' staging/src/k8s.io pkg cmd plugin \
  | grep -v -e code-generator -e sample-apiserver -e zz_generated | xargs -n1 dirname | sort -u \
  | sed 's,^staging/src/,k8s.io/kubernetes/vendor/,; s,^\(pkg\|cmd\|plugin\)/,k8s.io/kubernetes/\1/,' | paste -sd,)
"$work/openapi-gen" --logtostderr -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations.txt"
version=k8s.io/kubernetes/vendor/k8s.io/component-base/version
go build -trimpath -tags providerless -o "$work/plane" -ldflags "-s -w -X $version.gitVersion=v1.20.2 \
  -X $version.gitMajor=1 -X $version.gitMinor=20 -X $version.gitTreeState=archive -X $version.gitCommit=debian" \
  ./cmd/testplane
ln -sfn kube-apiserver "$out/kube-controller-manager"
ln -sfn kube-apiserver "$out/kube-scheduler"
mv "$work/plane" "$out/kube-apiserver"
