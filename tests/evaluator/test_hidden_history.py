"""Git history that an agent must not see."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluator_lab import Lab, git, work

from polar.errors import SandboxError
from polar.evaluator import hide_history
from polar.runtime import Runtime

SOLUTION = "the very solution"


@pytest.fixture
def base(repository: Path, tmp_path: Path) -> str:
    """The repository gets a future by every way that there is; its work folder is as at the base."""
    base = git(repository, "rev-parse", "HEAD")

    def commit(text: str) -> str:
        (repository / "solution.txt").write_text(f"{SOLUTION} {text}\n")
        git(repository, "add", "-A")
        git(repository, "commit", "-q", "-m", text)
        return git(repository, "rev-parse", "HEAD")

    git(repository, "checkout", "-q", "-b", "fix")
    commit("branch")
    git(repository, "tag", "v2")
    git(repository, "tag", "-a", "v3", "-m", SOLUTION)
    git(repository, "update-ref", "refs/remotes/origin/main", commit("remote"))
    git(repository, "update-ref", "refs/pull/7/head", commit("pull"))
    git(repository, "pack-refs", "--all")
    kept = commit("kept pack")
    git(repository, "repack", "-q", "-a", "-d")
    for pack in (repository / ".git" / "objects" / "pack").glob("*.pack"):
        pack.with_suffix(".keep").touch()
    commit("loose")
    (repository / "calc.py").write_text("# stash of " + SOLUTION)
    git(repository, "stash")
    git(repository, "notes", "add", "-m", SOLUTION, kept)
    git(repository, "checkout", "-q", "main")
    git(repository, "reset", "-q", "--hard", "fix")
    git(repository, "reset", "-q", "--hard", base)
    (repository / ".git" / "FETCH_HEAD").write_text(f"{kept}\t\tbranch 'fix' of elsewhere\n")
    git(repository, "config", "remote.origin.url", "https://example.com/x.git")
    git(repository, "config", "remote.origin.fetch", "+refs/heads/*:refs/remotes/origin/*")
    return base


async def told(runtime: Runtime, command: str) -> str:
    done = await runtime.exec(command, timeout_s=60)
    return (done.stdout + done.stderr).decode(errors="replace")


async def test_nothing_of_the_future_is_left(lab: Lab, base: str) -> None:
    async with lab.sandbox() as agent:
        assert SOLUTION in await told(agent, "git log --all -p; git fsck --lost-found; git stash list")
        history = await hide_history(agent, agent.workdir)
        assert history.base == base
        assert history.hidden >= 6
        everything = "git cat-file --batch-all-objects --batch --buffer | cat -v"
        for command in (
            everything,
            "git log --all --reflog -p",
            "git reflog --all",
            "git fsck --lost-found --unreachable",
            "grep -r . .git",
        ):
            assert SOLUTION not in await told(agent, command), command
        assert (await told(agent, "git rev-parse HEAD")).strip() == base
        assert (await told(agent, "git for-each-ref --format='%(refname)'")).split() == ["refs/heads/main"]
        assert await told(agent, "git status --porcelain; git remote; git stash list; git tag") == ""


async def test_the_repository_works_on_as_before(lab: Lab, base: str) -> None:
    async with lab.sandbox() as agent:
        await hide_history(agent, agent.workdir, base)
        identity = "-c user.name=a -c user.email=a@example.com"
        await work(
            agent, f"echo new > file && git add file && git {identity} commit -qm mine && git gc -q && git fsck && git checkout -qb other"
        )
        assert len((await told(agent, "git log --oneline")).splitlines()) == 2


async def test_history_before_the_base_stays(lab: Lab, base: str, repository: Path) -> None:
    git(repository, "-c", "core.hooksPath=/dev/null", "checkout", "-q", "fix")
    later = git(repository, "rev-parse", "HEAD~1")
    async with lab.sandbox() as agent:
        await hide_history(agent, agent.workdir, later)
        assert base in await told(agent, "git log --format=%H")
        assert "loose" not in await told(agent, "git log --all --format=%s")


async def test_the_tasks_own_commit_on_top_keeps_its_files_and_not_its_past(lab: Lab, base: str, repository: Path) -> None:
    git(repository, "checkout", "-q", "-b", "image", "fix")
    (repository / "solution.txt").unlink()
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "the image's own")
    async with lab.sandbox() as agent:
        before = await told(agent, "git ls-files; git status --porcelain")
        history = await hide_history(agent, agent.workdir, base)
        assert history.base == base
        assert await told(agent, "git ls-files; git status --porcelain") == before
        assert (await told(agent, "git rev-parse HEAD^")).strip() == base
        assert SOLUTION not in await told(agent, "git cat-file --batch-all-objects --batch --buffer | cat -v")


async def test_uncommitted_work_of_the_task_is_not_touched(lab: Lab, base: str, repository: Path) -> None:
    (repository / "calc.py").write_text("changed\n")
    (repository / "new.txt").write_text("new\n")
    git(repository, "add", "new.txt")
    async with lab.sandbox() as agent:
        before = await told(agent, "git status --porcelain; cat calc.py new.txt")
        await hide_history(agent, agent.workdir)
        assert await told(agent, "git status --porcelain; cat calc.py new.txt") == before


async def test_an_alternate_store_is_cut_off(lab: Lab, base: str, repository: Path) -> None:
    async with lab.sandbox() as agent:
        await work(agent, "cp -r . ~/other && cd ~ && git clone -q -s other copy && cd copy && git fetch -q origin 'refs/*:refs/x/*'")
        copy = f"{agent.home}/copy"
        await hide_history(agent, copy)
        assert await told(agent, f"cat {copy}/.git/objects/info/alternates 2> /dev/null") == ""
        assert SOLUTION not in await told(agent, f"cd {copy}; git cat-file --batch-all-objects --batch --buffer | cat -v")
        await work(agent, f"cd {copy} && git fsck")


async def test_a_detached_head_stays_detached(lab: Lab, base: str, repository: Path) -> None:
    git(repository, "checkout", "-q", "--detach", base)
    async with lab.sandbox() as agent:
        await hide_history(agent, agent.workdir)
        assert await told(agent, "git symbolic-ref -q HEAD || echo detached") == "detached\n"
        assert (await told(agent, "git rev-parse HEAD")).strip() == base
        assert await told(agent, "git for-each-ref") == ""


async def test_a_folder_without_a_repository_is_left_alone(lab: Lab) -> None:
    async with lab.sandbox() as agent:
        assert (await hide_history(agent, agent.workdir)).base is None


async def test_an_empty_repository(lab: Lab, template: Path) -> None:
    git(template, "init", "-q")
    async with lab.sandbox() as agent:
        assert (await hide_history(agent, agent.workdir)).base is None


async def test_a_repository_that_belongs_elsewhere_is_refused(lab: Lab, base: str) -> None:
    async with lab.sandbox() as agent:
        await work(agent, "cp -r . ~/other; git worktree add -q --detach ~/tree; mkdir ~/linked; ln -s ~/other/.git ~/linked/.git")
        for folder in ("tree", "linked"):
            with pytest.raises(SandboxError, match="elsewhere"):
                await hide_history(agent, f"{agent.home}/{folder}")
        assert SOLUTION in await told(agent, "cd ~/other; git log --all -p")


async def test_a_base_that_is_not_there_is_told(lab: Lab, repository: Path) -> None:
    async with lab.sandbox() as agent:
        with pytest.raises(SandboxError, match="base commit is not in the repository"):
            await hide_history(agent, agent.workdir, "f" * 40)
