#!/bin/sh
# Builds the repository in the current folder from the patches beside this script; the work starts at the base commit. As in a real clone, what
# upstream did later (the fix among it) lies in the object store, under origin/main: whoever runs an agent on this has to hide it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_COMMITTER_NAME=Examples GIT_COMMITTER_EMAIL=examples@polar.invalid
git init -q -b main .
git config user.name Examples
git config user.email examples@polar.invalid
git config gc.auto 0
git am -q --committer-date-is-author-date --no-gpg-sign "$here"/history/*.patch
base=$(git rev-parse HEAD)
git am -q --committer-date-is-author-date --no-gpg-sign "$here"/upstream/*.patch
git update-ref refs/remotes/origin/main HEAD
git reset -q --hard "$base"
