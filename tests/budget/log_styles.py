"""What logs do to a message: generated, and without any effect on what it states."""

import json
import re
import textwrap
from dataclasses import dataclass

UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
BARS = (
    "Epoch 1:  31%|####      | 31/100 [00:17<00:40,  1.71it/s, loss=0.123]",
    "  6%|\u2588\u2588\u2588\u258d     | 3787/62565 [04:47<1:10:53, 13.82it/s]",
    "100%|\u2588\u2588\u2588\u2588| 10/10 [00:01<00:00, 9.1it/s]",
    "| 1/2538 [00:00<?, ?it/s]",
    "12/100 [==>...........................]",
    "Training \u2501\u2501\u2501\u2501\u2501\u2501\u2501\u2501\u2501\u2501\u2501",
)
PREFIXES = (
    "[rank0]: ",
    "(pid=4123) ",
    "(RayTrainWorker pid=2211, ip=10.0.0.3) ",
    "(EngineCore_DP0 pid=223840) ERROR 10-25 13:08:43 [core.py:708] ",
    "0: ",
    "[1,0]<stderr>:",
    "ERROR:root:",
    "WARNING:trainer.loop:",
    "2026-11-21 22:55:01,123 - trainer - ERROR - ",
    "2026-11-21T22:55:01.123456Z ",
    "[2026-11-21 22:55:01] ",
    "[2026-11-21 22:55:01,123][trainer][ERROR] - ",
    "2026-11-21 22:55:01.123 | ERROR    | ",
    "22:55:01 ",
    "Nov 21 22:55:01 node1 kernel: ",
    "[44165.845229] ",
    "E1121 22:55:01.620000 2606 trainer.cc:869] ",
    "worker-1  | ",
    "> ",
    "E       ",
    "stderr: ",
    "INFO 11-21 22:55:01 [engine.py:160] ",
    "ERROR: ",
    "    ",
)
# What programs and runtimes put around an error: {} is its text, {json} it in JSON.
FRAMES = {
    "redis": "348:M 26 Nov 2025 15:27:52.733 # {}",
    "postgres": "2025-01-02 10:11:12.345 UTC [3074809] ERROR:  {}",
    "mysql": "2025-01-02T10:11:12.345678Z 0 [ERROR] [MY-012345] [InnoDB] {}",
    "spring": "2025-01-02T10:11:12.345+01:00 ERROR 41 --- [ main] c.a.Trainer  : {}",
    "klog": "E0102 10:11:12.345678       1 controller.go:114] {}",
    "logrus": 'time="2025-01-02T10:11:12Z" level=error msg="{json}"',
    "celery": "[2025-01-02 10:11:12,345: ERROR/ForkPoolWorker-1] {}",
    "actions": "2025-01-02T10:11:12.3456789Z ##[error]{}",
    "lambda": "[ERROR]\t2025-01-02T10:11:12.345Z\t8f5a1c2e-1111-2222-3333-4444\t{}",
    "unreal": "[2025.01.02-10.11.12:345][  0]LogCore: Error: {}",
    "pytest": "FAILED tests/test_a.py::test_fit - RuntimeError: {}",
    "kubernetes": "  Warning  Failed  12s  kubelet  Error: {}",
    "bold": "**{}**",
    "gRPC": "rpc error: code = Unknown desc = {}",
    "gRPC of Python": "<_InactiveRpcError of RPC that terminated with:\n"
    '\tstatus = StatusCode.INTERNAL\n\tdetails = "{json}"\n>',
    "Rust": 'Error: Train(Backend("{json}"))',
    "Rust unwrapped": 'called `Result::unwrap()` on an `Err` value: Acme("{json}")',
    "Rust structure": 'Error: Acme {{ code: 7, message: "{json}" }}',
    "Elixir": '%RuntimeError{{message: "{json}"}}',
    "Go structure": "&{{Severity:ERROR Code:XX000 Message:{} Detail: Hint:}}",
    "OCaml": 'Fatal error: exception Failure("{json}")',
    "Ruby": "#<RuntimeError: {}>",
    "node": "UnhandledPromiseRejectionWarning: Error: {}",
}


def frame(name, text):
    """Show a text as one of FRAMES does."""
    return FRAMES[name].format(text, json=json.dumps(text)[1:-1])


def wrap(text, width):
    """Break at blanks, as textwrap does."""
    lines = [textwrap.wrap(line, width) or [""] for line in text.split("\n")]
    return "\n".join(line for part in lines for line in part)


def hard_wrap(text, width):
    """Break at the last column, as a terminal does."""
    lines = []
    for line in text.split("\n"):
        lines += [line[i : i + width] for i in range(0, len(line), width)] or [""]
    return "\n".join(lines)


def prefix(text, head):
    return "\n".join(head + line for line in text.split("\n"))


def colour(text, code, cuts):
    """Colour words, as rich and loguru do."""
    words = re.split(r"(\s+)", text)
    for cut in cuts:
        at = cut % len(words)
        words[at] = f"\x1b[{code}m{words[at]}\x1b[0m"
    return "".join(words)


def draw_bar(text, bar, line, carriage):
    """Draw a progress bar between two lines, or over the end of one."""
    lines = text.split("\n")
    at = line % (len(lines) + 1)
    if carriage and at:
        lines[at - 1] = f"{lines[at - 1]}\r{bar}\r"
        return "\n".join(lines)
    return "\n".join([*lines[:at], bar, *lines[at:]])


def quote(text, how):
    if how == "json":
        return json.dumps({"level": "error", "message": text})
    if how == "json twice":
        return json.dumps({"line": json.dumps({"msg": text})})
    return repr(RuntimeError(text)) if how == "repr" else f"b{text!r}"


@dataclass(frozen=True)
class Style:
    """One way to log a text, as functions from text to text."""

    names: tuple[str, ...]
    steps: tuple

    def __call__(self, text):
        for step in self.steps:
            text = step(text)
        return text

    def __repr__(self):
        return " > ".join(self.names)


def _draw_wrapping(chance, terminal):
    how = chance.choice(["blanks", "terminal"] if terminal else ["blanks"])
    width = chance.randint(30, 140)
    if how == "blanks":
        return f"wrap {width}", lambda text: wrap(text, width)
    return f"terminal {width}", lambda text: hard_wrap(text, width)


def _draw_colours(chance):
    code = chance.choice(["31", "1;31", "38;5;196", "0;33"])
    cuts = [chance.randint(0, 200) for _ in range(chance.randint(0, 4))]
    return f"colour {code}", lambda text: colour(text, code, cuts)


def _draw_progress_bar(chance):
    bar, line = chance.choice(BARS), chance.randint(0, 30)
    carriage = chance.random() < 0.5
    return f"bar {bar[:12]} {line}", lambda text: draw_bar(text, bar, line, carriage)


def _draw_prefix(chance):
    head = chance.choice(PREFIXES)
    return f"prefix {head!r}", lambda text: prefix(text, head)


def _draw_quoting(chance, is_error):
    # Whose words are in the repr of an error was raised: no look-alike is.
    how = chance.choice(["json", "json twice", "bytes", *["repr"] * is_error])
    return how, lambda text: quote(text, how)


def draw_style(chance, *, is_error, terminal=True):
    """Draw a chain of what a log does, in the order in which it does it.

    Args:
        chance: A ``random.Random``: the same cases in every process, which hypothesis
            does not promise (it also draws constants of the modules loaded so far).
        is_error: Whether the text is one that an error may have.
        terminal: Whether lines may be broken inside of words.
    """
    steps = []
    if chance.random() < 0.6:
        steps.append(_draw_wrapping(chance, terminal))
    if chance.random() < 0.5:
        steps.append(_draw_colours(chance))
    if chance.random() < 0.25:
        steps.append(_draw_progress_bar(chance))
    steps += [_draw_prefix(chance) for _ in range(chance.randint(0, 2))]
    if chance.random() < 0.55:
        steps.append(_draw_quoting(chance, is_error))
    if chance.random() < 0.2:
        steps.append(("crlf", lambda text: text.replace("\n", "\r\n")))
    return Style(*zip(*steps, strict=True)) if steps else Style((), ())


AMOUNT = re.compile(
    # not a part of a whole that has no unit of its own: "11.8 / 12.3 GB"
    r"(?<![\w.,/])(?<!\d / )(\d+(?:\.\d+)?) ?([KMGT])(i?)B\b"
)


FORMS = ("bytes", "MiB", "MB", "GiB 1", "GiB 2", "GiB", "tight")
"""How an amount can be written."""
ROUNDING = {"GiB 1": 2**30 / 20, "GiB 2": 2**30 / 200, "MiB": 5300, "MB": 5300}


def with_amounts_in(form, text):
    """Write every amount in another way: its unit, its digits, a blank before it."""

    def rewrite(match):
        number, power, binary = match.groups()
        size = float(number) * 2 ** UNITS[power]
        if form == "bytes":
            return f"{round(size)} bytes"
        if form in {"MiB", "MB"}:
            return f"{size / 2**20:.2f} {form}"
        if form == "tight":
            return f"{number}{power}{binary}B"
        digits = {"GiB 1": 1, "GiB 2": 2, "GiB": 6}[form]
        return f"{size / 2**30:.{digits}f} GiB"

    return AMOUNT.sub(rewrite, text)
