"""The scripts that type checkers read have the lines of their pages."""

from page_scripts import scripts_of, write_scripts

PAGE = """# Numbers

```python
number = 1
```

Between.

```python
>>> def double(n):
...     return 2 * n
>>> double("a", 3)
6

```

<!-- file: train.py -->
```python
import torch
```
"""


def test_a_line_of_a_script_is_the_line_of_its_page(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)

    scripts = scripts_of(tmp_path / "page.md")

    assert set(scripts) == {"page.py", "page__train.py"}
    lines = PAGE.splitlines()
    shown = [line.removeprefix(">>> ").removeprefix("... ") for line in lines]
    for name, script in scripts.items():
        for number, line in enumerate(script.splitlines()[1:], 1):
            assert line in ("", shown[number]), (name, number)
    assert 'double("a", 3)' in scripts["page.py"]
    assert "import torch" in scripts["page__train.py"]


def test_every_page_with_python_has_a_script(tmp_path):
    write_scripts(tmp_path / "page_scripts")

    names = {file.name for file in (tmp_path / "page_scripts").iterdir()}
    assert {"__init__.py", "readme.py", "molecules.py", "ddp__train.py"} <= names
