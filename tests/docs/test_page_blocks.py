import sys

import pytest
from page_blocks import PageError, read_page, run_page


@pytest.fixture
def run_text(tmp_path):
    def run_text(text):
        page = tmp_path / "page.md"
        page.write_text(text)
        (tmp_path / "folder").mkdir()
        run_page(read_page(page), tmp_path / "folder")
        return tmp_path / "folder"

    return run_text


def test_blocks_share_their_names_and_output_is_compared(run_text):
    run_text(
        "# A page\n```python\na = 3\n```\nand then\n"
        "```python\nprint(a, object())\n```\n```text\n3 <object object at ...>\n```\n"
    )


def test_another_output_is_told_with_its_line(run_text):
    with pytest.raises(PageError, match=r"page.md:2: the page shows\n3\n\n.*\n4\n"):
        run_text("```python\nprint(4)\n```\n```text\n3\n```\n")


def test_only_what_a_busy_machine_adds_to_a_plan_need_not_be_shown(run_text):
    plan = "seed      0\nprobe     took 287 ms: a sample\n          takes 2 ms\nlast  1"
    run_text(f"```python\nprint({plan!r})\n```\n```text\nseed 0\nlast 1\n```\n")


def test_what_is_printed_must_be_shown(run_text):
    with pytest.raises(PageError, match="hidden"):
        run_text("```python\nprint('hidden')\n```\nno output here\n")


def test_an_error_has_the_line_of_the_page(run_text):
    with pytest.raises(ZeroDivisionError) as caught:
        run_text("# A page\n\n```python\n1 / 0\n```\n")

    assert caught.traceback[-1].lineno + 1 == 4


def test_the_code_of_a_class_on_a_page_can_be_read_and_its_objects_pickled(run_text):
    run_text(
        "```python\nimport inspect, pickle\nclass A:\n    b = 1\n```\n"
        "```python\nprint(inspect.getsource(A).count('b = 1'))\n"
        "print(pickle.loads(pickle.dumps(A())).b)\n```\n```text\n1\n1\n```\n"
    )

    assert "my_page" not in sys.modules


def test_a_file_is_written_and_a_command_runs_it(run_text):
    folder = run_text(
        "<!-- file: hello.py -->\n```python\nprint('hello')\n```\n"
        "```console\n$ python \\\n    hello.py\nhello\n```\n"
    )

    assert (folder / "hello.py").read_text() == "print('hello')\n"


def test_the_output_of_a_command_is_compared(run_text):
    with pytest.raises(PageError, match="loaderkit 0"):
        run_text(
            "```console\n$ loaderkit --version\nloaderkit of another version\n```\n"
        )


def test_a_command_that_is_not_run_must_install_something(run_text):
    with pytest.raises(PageError, match="rm"):
        run_text("```sh\nrm -r everything\n```\n")


def test_a_page_says_what_it_needs(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- needs: json, no_such_module -->\n")

    assert read_page(page).missing_modules() == ["no_such_module"]


@pytest.mark.parametrize("text", ["```python\n1\n", "<!-- file: a.py -->\nno block\n"])
def test_a_page_that_is_not_whole_is_refused(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text)

    with pytest.raises(PageError, match="not closed"):
        read_page(page)


def test_a_page_without_blocks_has_nothing_to_run(run_text):
    run_text("# Words alone\n")
