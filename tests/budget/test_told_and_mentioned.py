"""Pairs of laws: the same words reported, and in forms that report nothing.

What a program tells its user, statuses, exits, limits and full directories are read in
any words of their kind; code, lists, rules and programs that go on with them are not.
"""

import itertools

import pytest

from loaderkit.budget.diagnosis.messages import read_message


def unread(texts):
    return [text for text in texts if read_message(text).is_oom is False]


def taken(texts):
    return [text for text in texts if read_message(text).is_oom is not False]


SUBJECTS = ("The browser", "Your device", "This page", "The server", "Acme Studio")
DIALOGS = (
    "{} ran out of memory while loading the model. Close other tabs and try again.",
    "{} ran out of memory during the export. Please restart the app.",
    "{} ran out of memory opening this file. Try a smaller one.",
    "{} has run out of memory. Reduce the resolution.",
    "{} could not allocate enough memory for this project. Choose a smaller one.",
    "{} does not have enough memory to open this file. Close other programs.",
)
MENTIONED_DIALOGS = (
    "return '{}';",
    "throw new Error('{}')",
    'const LOW = "{}";',
    "| E12 | {} | see below |",
    "<li>\n  {}\n</li>",
    '  "{}",',
    "// {}",
    "if (low) showToast('{}')",
    "assert text == '{}'",
    "  ? '{}'\n  : message,",
)


@pytest.mark.parametrize("dialog", DIALOGS)
def test_what_a_program_tells_its_user_is_a_report(dialog):
    assert unread(dialog.format(subject) for subject in SUBJECTS) == []


@pytest.mark.parametrize("frame", MENTIONED_DIALOGS)
def test_what_a_program_would_tell_its_user_is_none(frame):
    dialogs = [dialog.format("The browser") for dialog in DIALOGS]

    assert taken(map(frame.format, dialogs)) == []


ABORTS = (
    "RuntimeError: abort({}) at Error\n    at jsStackTrace (build.js:2:27415)",
    "Uncaught RuntimeError: abort({})",
    "Uncaught (in promise) abort({})",
    "RuntimeError: Aborted({})",
    "thread 'main' panicked at {}, src/frames.rs:212:21",
)
WORDS_OF_A_CRASH = (
    "FATAL: OOM",
    "Kernel panic - not syncing: OOM",
    "###!!! ABORT: OOM: file text.cpp, line 612",
    "Hit MOZ_CRASH(OOM) at text.cpp:882",
    "worker crashed: OOM",
    "OOM, aborting",
    "OOM! Aborting.",
    "aborted with OOM",
    "terminated (OOM)",
    "*** OOM ***",
    "Crash reason: EXC_BREAKPOINT\nSignature: OOM | large | alloc_abort | grow",
)
ABORTS_OF_CODE = (
    "abort({});",
    "None => abort({})",
    "if (!p) abort({});",
    "function grow() {{\n  abort({});\n}}",
    "panic!({})",
    "die({}) unless $p;",
    "throw new Error({})",
    "m.contains('abort({})')",
    "It calls abort({}) when the heap cannot grow.",
)


@pytest.mark.parametrize("word", ["OOM", '"OOM"', "'OOM'"])
def test_a_crash_needs_one_word(word):
    assert unread(abort.format(word) for abort in ABORTS) == []


def test_a_crash_has_one_word_in_any_form():
    assert unread(WORDS_OF_A_CRASH) == []


@pytest.mark.parametrize("abort", ABORTS_OF_CODE)
def test_code_that_would_abort_is_no_crash(abort):
    assert taken([abort.format('"OOM"')]) == []


CONSTANTS = tuple(
    f"{prefix}_{name}"
    for prefix in ("STATUS", "SBOX_FATAL", "ACME_ERR")
    for name in (
        *("MEMORY_EXCEEDED", "MEMORY_EXHAUSTION", "MEM_EXHAUSTED", "MEMORY_FULL"),
        *("MEMORY_LIMIT_REACHED", "NOT_ENOUGH_MEMORY", "MEMORY_SHORTAGE"),
    )
)


@pytest.mark.parametrize(
    "line", ["Error code: {}", "crashed with {} (0x2)", "reason={}"]
)
def test_a_status_is_known_by_its_form(line):
    assert unread(map(line.format, CONSTANTS)) == []


@pytest.mark.parametrize(
    "line",
    [
        "    {} = 4,",
        "case {}: return 4;",
        "#define {} 4",
        "- `{}`: raise the limit",
        "throw AcmeException({});",
        "returns {} if the heap is full",
    ],
)
def test_a_status_in_code_or_in_a_list_is_no_event(line):
    assert taken(map(line.format, CONSTANTS)) == []


EXITS = ("step 4/7 train: exited with code 137", "rc=137", "train failed (rc -9)")
BANNERS = ("##### {} #####", "*** {} ***", "=== {} ===", ">>> {} <<<", "--- {} ---")


@pytest.mark.parametrize("banner", ["{}", *BANNERS])
def test_a_banner_hides_no_exit(banner):
    assert unread(map(banner.format, EXITS)) == []


@pytest.mark.parametrize("banner", BANNERS)
def test_a_banner_changes_no_message(banner):
    message = "CUDA out of memory. Tried to allocate 2.00 GiB"

    in_a_banner = read_message(banner.format(message))

    assert (in_a_banner.kind, in_a_banner.requested) == ("device_oom", 2 << 30)


def test_a_number_that_is_no_exit_is_none():
    texts = (
        *("## Exit code 137", "### exit status 137", "test_exit_code_137 passed"),
        *("=== 137 tests ===", "*** 137 files ***", "src=137", "retry=137"),
        "expect(localizeError('worker exited with status 137')).toBe(x)",
        '"the previous run exited with status 137" is useful to know',
    )

    assert taken(texts) == []


SHORTAGES = (
    *("cannot allocate memory", "CUDA out of memory", "insufficient VRAM"),
    *("not enough GPU memory", "mlock failed: Cannot allocate memory"),
)
GOES_ON = (
    *(", continuing", " - continuing anyway", ", falling back to the CPU"),
    *(", switching to disk", ", forcing a cleanup", "; retrying with batch 4"),
    *(", proceeding without cache", "; using managed memory instead"),
)


@pytest.mark.parametrize("shortage", SHORTAGES)
def test_a_program_that_goes_on_reports_nothing(shortage):
    assert taken(f"loader: {shortage}{end}" for end in GOES_ON) == []


@pytest.mark.parametrize("shortage", SHORTAGES)
def test_a_program_that_ends_reports_it(shortage):
    ends = ("", ", aborting", "; job stopped", ", exiting", "; cannot continue")

    assert unread(f"loader: {shortage}{end}" for end in ends) == []


OVERSTEPPINGS = (
    "has reached its {}",
    "hit the {}",
    "has exceeded the {}",
    "hit its {}",
)
LIMITS = ("memory limit", "memory budget", "RAM limit", "VRAM budget", "memory cap")


@pytest.mark.parametrize("overstepping", OVERSTEPPINGS)
def test_a_limit_is_reached_or_hit(overstepping):
    ways = itertools.product(("worker 3", "rp2paths", "the job"), LIMITS)

    assert (
        unread(f"ERROR {who} {overstepping.format(limit)}" for who, limit in ways) == []
    )


@pytest.mark.parametrize(
    "rule",
    [
        "when {} is reached, rows are spilled",
        "// we hit the {} here",
        "large teams hit the {} again",
        "careful not to hit the {}",
        "before it hits the {}, the cache is cleared",
        "- **{} reached**: raise it",
    ],
)
def test_a_limit_that_can_be_reached_is_not(rule):
    assert taken(map(rule.format, LIMITS)) == []


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: Not enough space in /dev/shm! Need 512 MiB, have 64 MiB",
        "Error: not enough space on /dev/shm: need 512 MiB, only 64 MiB free",
        "fatal: /dev/shm is full: 512 MiB needed, 64 MiB free",
        "ERROR: insufficient space in /dev/shm (required 512 MiB, available 64 MiB)",
    ],
)
def test_shared_memory_is_short_in_any_words(text):
    message = read_message(text)

    assert (message.kind, message.requested, message.free) == (
        "shm",
        512 << 20,
        64 << 20,
    )


@pytest.mark.parametrize("call", ["mlock", "mmap", "shmget", "sbrk", "ibv_reg_mr"])
def test_enomem_is_known_by_its_number(call):
    forms = ("{} failed. Errno 12.", "{}() failed: errno 12", "{} failed, errno=12")
    messages = [read_message(form.format(call)) for form in forms]

    assert [(message.kind, message.errno) for message in messages] == [
        ("host_alloc", 12)
    ] * len(forms)
    assert taken(form.format(call).replace("12", "13") for form in forms) == []


@pytest.mark.parametrize("what", ["File size", "Segment size 40960", "Request body"])
def test_an_input_is_no_memory(what):
    assert taken([f"{what} exceeds maximum buffer size 32768"]) == []
    assert unread([f"Buffer of {what} bytes exceeds maximum buffer size 32768"]) == []


@pytest.mark.parametrize("end", ["ended", "died", "finished"])
def test_a_status_stands_behind_how_it_ended(end):
    assert unread([f"=== training {end} (status 137) after 00:12:41 ==="]) == []
    assert taken([f"=== training {end} (status 1) after 00:13:37 ==="]) == []


@pytest.mark.parametrize("reason", ["oom", "out of memory"])
def test_a_record_as_node_prints_it_is_read(reason):
    texts = (
        f'webContents render-process-gone {{ reason: "{reason}", exitCode: 5 }}',
        f"worker exit {{ code: 1, reason: '{reason}' }}",
        f"render process gone: {reason}",
    )

    assert unread(texts) == []
    assert taken([f'return {{ reason: "{reason}", exitCode: 5 }};']) == []


@pytest.mark.parametrize("what", ["this page", "the file", "your project"])
@pytest.mark.parametrize("failure", ["could not open", "failed to load", "cannot show"])
def test_a_reason_behind_because_is_a_report(failure, what):
    texts = [f"Acme {failure} {what} because the device is out of memory."]

    assert unread(texts) == []


@pytest.mark.parametrize("card", ["the card", "this machine", "your GPU"])
def test_more_is_needed_than_something_has(card):
    message = read_message(
        f"fatal: this run needs 48.0 GB of VRAM and {card} has 24.0 GB; stopping"
    )

    assert (message.requested, message.capacity) == (48 << 30, 24 << 30)


def test_what_did_not_happen_or_is_only_near_is_none():
    texts = (
        *("OOM detected: False", "oom: no", "OOM detected, reducing batch_size to 4"),
        "Your device is running low on memory. Close some apps.",
        "WebGPU ran out of memory. Retrying with a smaller prompt...",
        'return {"error": "Model does not fit in GPU memory", "needed": needed}',
    )

    assert taken(texts) == []


@pytest.mark.parametrize("hedge", ["may have run", "possibly ran", "might be"])
def test_an_error_that_guesses_its_cause_is_maybe(hedge):
    text = f"RuntimeError: export failed (the GPU {hedge} out of memory)"

    assert read_message(text).is_oom == "maybe"


@pytest.mark.parametrize("program", ["Step 4", "The build", "node builder"])
def test_an_exit_value_is_a_status(program):
    assert unread([f"{program} failed: process ended with exit value 137"]) == []
    assert taken([f"{program} failed: process ended with exit value 1"]) == []


@pytest.mark.parametrize("program", ["renderer", "worker", "container"])
def test_a_headline_tells_what_ended(program):
    assert unread([f"{program} process OOM"]) == []


ONCE_IN_A_WHILE = (
    "Once in a while the loader ran out of memory while 95 GiB were free, which was "
    "hardly seen before. {words}. Once in a while the loader was killed by the OOM "
    "killer although only 27 GB had been reserved, which was never seen before on "
    "machine 6414."
)
SEEN_BY_NOBODY = (
    "It was seen by nobody who looked at the machines of the other rooms, and by none "
    "of those who did not look, nor by those who were there before, or came later on"
)


@pytest.mark.parametrize("first", range(60, len(SEEN_BY_NOBODY), 12))
def test_the_middle_of_a_long_line_is_not_its_beginning(first):
    """Of a long line a window is looked at, which may begin at "loader ran out"."""
    for length in range(first, first + 12):
        text = ONCE_IN_A_WHILE.format(words=SEEN_BY_NOBODY[:length])

        assert read_message(text).is_oom is False, length
