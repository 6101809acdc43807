"""Every code block of the pages runs, and every public name has its place in them."""

import inspect
import os
import re
from pathlib import Path

import pytest
from fresh_process import in_fresh_process
from page_blocks import read_page, run_page
from page_scripts import PAGES_THAT_BEGIN_WITH_USE

import loaderkit

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "loaderkit"
PAGES = [
    DOCS / "index.md",
    *(DOCS / f"{name}.md" for name in PAGES_THAT_BEGIN_WITH_USE),
    *sorted(
        file
        for folder in ("tutorials", "how-to", "reference", "explanation")
        for file in DOCS.glob(f"{folder}/*.md")
    ),
]
LEAK_VERDICT = re.compile(r"LeakDetector\(|LeakCallback\(|assert_no_leak\(")
"""What earlier tests leave behind in a process is in its verdict, too."""
RUNS_ALL_PAGES = "RUN_ALL_PAGES" in os.environ
"""Set by ``tox -e docs``: no page may be left out."""


@pytest.mark.slow
# What trainers and torch warn of on their own pages is theirs.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.*num_workers.*:UserWarning")
# PyG reads its own file again as it always did; whether it must depends on what else
# this process has told torch to trust.
@pytest.mark.filterwarnings("ignore:Weights only load failed:UserWarning")
@pytest.mark.parametrize("file", PAGES, ids=lambda f: f.relative_to(DOCS).as_posix())
def test_every_block_of_a_page_runs_and_prints_what_is_shown(
    file, tmp_path, monkeypatch
):
    page = read_page(file)
    if not RUNS_ALL_PAGES and page.is_slow:
        pytest.skip("tox -e docs runs it: it starts several processes")
    if not RUNS_ALL_PAGES and page.missing_modules():
        pytest.skip(f"this machine lacks {', '.join(page.missing_modules())}")
    monkeypatch.setenv("COLUMNS", "80")

    if any(LEAK_VERDICT.search(block.text) for block in page.blocks):
        run_page_in_fresh_process(file, tmp_path)
    else:
        run_page(page, tmp_path)


@in_fresh_process
def run_page_in_fresh_process(file, folder):
    run_page(read_page(file), folder)


def test_a_page_of_each_kind_has_blocks_that_run():
    running = {
        file.parent.name
        for file in PAGES
        if any(block.language == "python" for block in read_page(file).blocks)
    }

    assert {"docs", "tutorials", "how-to"} <= running


def test_every_public_name_is_in_the_reference():
    text = "".join(file.read_text() for file in DOCS.glob("reference/*.md"))
    documented = set(re.findall(r"^\.\. auto\w+:: loaderkit\.([\w.]+)$", text, re.M))

    assert public_names() - documented == set()
    assert {name for name in documented if "." not in name} <= public_names()


def public_names():
    """Name what the front door gives, and what is in the modules that it gives."""
    names = set()
    for name in set(loaderkit.__all__) - {"__version__"}:
        item = getattr(loaderkit, name)
        if inspect.ismodule(item):
            names |= {f"{name}.{part}" for part in defined_in(item)}
        else:
            names.add(name)
    return names


def defined_in(module):
    """Name the public functions and classes that a module defines."""
    return {
        name
        for name, item in vars(module).items()
        if getattr(item, "__module__", None) == module.__name__ and name[0] != "_"
    }


@pytest.mark.parametrize(
    "file",
    sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "benchmarks/README.md"]),
    ids=lambda f: f.relative_to(ROOT).as_posix(),
)
def test_links_to_files_lead_somewhere(file):
    assert dead_links(file) == []


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "there.md").write_text("# A heading, of a page\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[1](there.md) [2](https://a.b/c) [3](there.md#a-heading-of-a-page)\n"
        "[4](nowhere.md) [5](there.md#another)\n```\n[6](in-code.md)\n```\n"
    )

    assert dead_links(page) == ["nowhere.md", "there.md#another"]


def dead_links(file):
    """Name the links of a page to files or headings that are not there."""
    text = re.sub(r"^```.*?^```$", "", file.read_text(), flags=re.M | re.S)
    targets = re.findall(r"\]\((?!\w+:)([^)\s]+)\)", text)
    return [target for target in targets if not leads_somewhere(file, target)]


def leads_somewhere(file, target):
    path, _, heading = target.partition("#")
    linked = (file.parent / path).resolve() if path else file
    if not heading:
        return linked.exists()
    return linked.is_file() and heading in headings(linked)


def headings(file):
    """Give the names under which a page's headings are linked to."""
    titles = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
    }


def test_pages_that_the_code_names_exist():
    named = {
        page
        for file in ROOT.glob("loaderkit/**/*.py")
        for page in re.findall(r"docs/[\w/-]+\.md", file.read_text())
    }

    assert named
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []


def test_every_error_and_warning_of_ours_is_in_the_reference():
    text = (DOCS / "reference" / "errors.md").read_text()
    documented = set(re.findall(r"^\.\. autoexception:: loaderkit\.(\S+)$", text, re.M))

    assert errors_of_ours() - documented == set()


def errors_of_ours():
    """Name the classes that a caller may be given, wherever a file defines them.

    Files are read, as no process has all that loaderkit works with: a class is ours if
    it is made of ``LoaderkitError``, in however many steps, or of a warning.
    """
    bases = {}
    for file in SOURCE.rglob("*.py"):
        module = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        for name, of in re.findall(r"^class (\w+)\(([^)]*)\):", file.read_text(), re.M):
            bases[name] = (f"{module}.{name}", set(re.findall(r"\w+", of)))
    told = {"LoaderkitError", "UserWarning", "Warning", "RuntimeWarning"}
    while more := {name for name, (_, of) in bases.items() if of & told} - told:
        told |= more
    return {
        bases[name][0] for name in told if name in bases and not name.startswith("_")
    }
