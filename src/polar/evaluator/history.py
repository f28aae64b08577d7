"""Git history that an agent must not see: commits after the one that its task starts from, which often hold the solution.

Meant to run before the agent does, on a repository that came with the task. Knows no harness and no evaluator.
"""

from __future__ import annotations

from dataclasses import dataclass

from polar.errors import SandboxError
from polar.evaluator.commands import GIT_ENV
from polar.runtime.base import Runtime


@dataclass(frozen=True, slots=True)
class History:
    """What was done: `base` is the newest commit that can still be reached, `None` where the folder is no repository; `hidden` counts
    the commits that were there before and are gone."""

    base: str | None
    hidden: int


# Everything that names a commit goes but HEAD; HEAD is base, or, where the image has commits of its own on top, one new commit with
# HEAD's files on base. Then objects that nothing names are pruned, and what is left is counted: a pack that is kept, an alternate
# store, a shallow or partial clone cannot keep a commit without being found here. The work folder and the index are not touched.
_SCRIPT = r"""
set -eu
cd -- "$1"
base=$2
[ -e .git ] || exit 40
{ [ -d .git ] && [ ! -L .git ]; } || exit 46
command -v git > /dev/null || exit 41
git rev-parse --git-dir > /dev/null || exit 42
dir=$(git rev-parse --absolute-git-dir)
common=$(cd "$(git rev-parse --git-common-dir)" && pwd -P)
top=$(git rev-parse --show-toplevel)
[ "$(cd "$top" && pwd -P)" = "$(pwd -P)" ] || exit 40
[ "$common" = "$(pwd -P)/.git" ] || exit 46
owner=$(stat -c %u:%g .git)
count() { git cat-file --batch-all-objects --batch-check='%(objecttype) %(objectname)' | sed -n 's/^commit //p' | sort -u; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
count > "$scratch/before"
if ! git rev-parse -q --verify HEAD > /dev/null; then
    head=
    [ -z "$base" ] || exit 43
else
    head=$(git rev-parse --verify 'HEAD^{commit}')
    [ -n "$base" ] || base=$head
    base=$(git rev-parse -q --verify "$base^{commit}") || exit 43
    if [ "$head" != "$base" ] && ! git merge-base --is-ancestor "$head" "$base"; then
        head=$(git -c user.name=task -c user.email=task@localhost commit-tree -p "$base" -m "The task's own files" "$head^{tree}")
    fi
fi
branch=$(git symbolic-ref -q HEAD || true)
for remote in $(git remote); do git remote remove "$remote"; done
if [ -n "$head" ]; then
    if [ -n "$branch" ]; then git update-ref --no-deref "$branch" "$head"; else git update-ref --no-deref HEAD "$head"; fi
fi
git for-each-ref --format='%(refname)' | while read -r ref; do
    [ "$ref" = "$branch" ] || git update-ref --no-deref -d "$ref"
done
rm -rf "$common/logs" "$dir/logs" "$common/info/grafts" "$common/shallow" "$common/objects/info/commit-graph" \
    "$common/objects/info/commit-graphs" "$common/refs/replace" "$common/worktrees" "$common/rr-cache" \
    "$common/lost-found" "$common/rebase-merge" "$common/rebase-apply" "$common/sequencer"
for name in ORIG_HEAD FETCH_HEAD MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD BISECT_LOG MERGE_MSG COMMIT_EDITMSG AUTO_MERGE; do
    rm -f "$dir/$name" "$common/$name"
done
git config --local --unset-all remote.origin.promisor 2> /dev/null || true
git config --local --unset-all extensions.partialClone 2> /dev/null || true
find "$common/objects/pack" \( -name '*.keep' -o -name '*.promisor' -o -name '*.bitmap' \) -exec rm -f {} + 2> /dev/null || true
git -c repack.writeBitmaps=false repack -q -a -d --no-write-bitmap-index
rm -f "$common/objects/info/alternates"
git reflog expire --expire=now --expire-unreachable=now --all
git prune --expire=now
git pack-refs --all
chown -R "$owner" .git "$common" 2> /dev/null || true
count > "$scratch/after"
if [ -n "$head" ]; then git rev-list HEAD | sort -u > "$scratch/allowed"; else : > "$scratch/allowed"; fi
if grep -vxFf "$scratch/allowed" "$scratch/after" > "$scratch/left" && [ -s "$scratch/left" ]; then
    echo "still there: $(head -n 3 "$scratch/left" | tr '\n' ' ')" >&2
    exit 44
fi
git fsck --connectivity-only --no-dangling > /dev/null 2> "$scratch/fsck" || { cat "$scratch/fsck" >&2; exit 45; }
if [ -n "$head" ]; then echo "base $base"; fi
echo "hidden $(grep -vxFf "$scratch/after" "$scratch/before" | wc -l)"
"""

_WHY = {
    41: "there is a repository, but no git in the sandbox to clean it with: install git in the image, or leave .git out",
    42: "git does not take .git for a repository",
    43: "the base commit is not in the repository",
    44: "commits that are not before the base commit cannot be removed",
    46: "its .git is a link or a linked worktree: the history belongs to a repository elsewhere, which is not to be changed; copy it",
    45: "the repository is not complete any more",
}


async def hide_history(runtime: Runtime, repo_dir: str, base_commit: str | None = None, *, timeout_s: float = 300.0) -> History:
    """Makes every commit that is not `base_commit` (`None`: HEAD) or before it unreachable, and checks that it is: no ref, no reflog,
    no packed or loose object is left. Files in the work folder stay as they are.

    A folder that is no repository's top is left alone. Raises `SandboxError` where it cannot be done, with the reason.
    """
    done = await runtime.exec(["sh", "-c", _SCRIPT, "sh", repo_dir, base_commit or ""], env=GIT_ENV, timeout_s=timeout_s)
    if done.exit_code == 40:
        return History(None, 0)
    if not done.ok:
        why = "it took too long" if done.timed_out else _WHY.get(done.exit_code, f"exit code {done.exit_code}")
        raise SandboxError(f"the git history of {repo_dir} could not be hidden: {why}. {done.tail()}".rstrip())
    facts = dict(line.split(" ", 1) for line in done.text.splitlines() if " " in line)
    return History(facts.get("base"), int(facts.get("hidden", "0").strip() or 0))
