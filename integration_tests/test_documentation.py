"""The Python examples of every README and every page of the site run as they stand: alone, and on two ranks."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from mktestdocs import check_md_file

from test_support.jobs import mpiexec_of_tests, run_within, skip_without_mpiexec

ROOT = Path(__file__).parent.parent
READMES = sorted((ROOT / "packages").glob("*/README.md"))
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "```python" in page.read_text()]
# Elastic training needs a store that outlives each rank, such as that of torchrun's agent.
UNDER_TORCHRUN = {"survive-failures.md"}
# The program sets the rank's variables itself.
ALONE = {"from-torchrun.md"}
ON_TWO_RANKS = [page for page in [*READMES, *PAGES] if page.name not in ALONE]
LIMIT_S = 240.0

pytestmark = [pytest.mark.launch, pytest.mark.timeout(2 * LIMIT_S + 60)]


@pytest.fixture(autouse=True)
def kept_handler() -> Iterator[None]:
    """Restores the action of SIGTERM, which a page sets."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_examples_of_a_readme_run(readme: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "```python" in readme.read_text(), "a README without an example would pass"
    monkeypatch.chdir(tmp_path)
    check_md_file(fpath=readme, memory=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_examples_of_a_page_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # some save files there
    check_md_file(fpath=page, memory=True)


def test_most_pages_have_examples() -> None:
    assert len(PAGES) >= 10


@pytest.fixture(scope="module")
def printed_by_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of two jobs that run all programs one after the other, so that a rank loads torch only once."""
    mpiexec = mpiexec_of_tests()
    skip_without_mpiexec(mpiexec)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    folder = tmp_path_factory.mktemp("programs")
    return "\n".join(
        output_of([*launcher, str(ROOT / "integration_tests" / "documentation_programs.py"), *map(str, pages)], folder)
        for launcher, pages in [
            ([*mpiexec, "-n", "2", sys.executable], those(ON_TWO_RANKS, under_torchrun=False)),
            (torchrun, those(ON_TWO_RANKS, under_torchrun=True)),
        ]
    )


def those(pages: Iterable[Path], *, under_torchrun: bool) -> list[Path]:
    return [page for page in pages if (page.name in UNDER_TORCHRUN) == under_torchrun]


def output_of(command: list[str], folder: Path) -> str:
    """The output of a job. If the programs of a page fail or hang, the page is missing in it."""
    job, is_late = run_within(command, folder, LIMIT_S, {"OMP_NUM_THREADS": "1", "SYNCLINE_TIMEOUT_S": "30"})
    return f"{job.output}\nthe job did not end within {LIMIT_S:g} s" if is_late else job.output


@pytest.mark.parametrize("page", ON_TWO_RANKS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_programs_of_a_page_run_on_two_ranks(page: Path, printed_by_two_ranks: str) -> None:
    assert printed_by_two_ranks.count(f"ran {page}\n") == 2, printed_by_two_ranks[-4000:]
