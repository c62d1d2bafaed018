"""`progress=True`: a bar, for every call that takes `progress`."""

import contextlib
import io
import subprocess
import sys

import numpy as np
import pytest

import flash_numba
from flash_numba import attention, interface, prepared, progress, rules

Q = np.random.default_rng(0).standard_normal((2, 20, 8)).astype(np.float32)
PACKED, OFFSETS = Q.swapaxes(0, 1), [np.array([0, 12, 20])] * 2
OUT, LSE = np.zeros_like(Q), np.zeros(Q.shape[:-1], np.float32)
CALLS = {
    "attention": (Q, Q, Q),
    "attention_varlen": (PACKED, PACKED, PACKED, *OFFSETS),
    "attention_partial": (Q, Q, Q),
    "attention_grad": (Q, Q, Q, Q, OUT, LSE),
    "attention_varlen_grad": (PACKED, PACKED, PACKED, PACKED, OUT.swapaxes(0, 1), LSE, *OFFSETS),
    "warmup": (),
}


def do(name, **options):
    if name == "attention_partial":
        options["q_offset"] = 0
    return getattr(flash_numba, name)(*CALLS[name], **options)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@contextlib.contextmanager
def terminal():
    """What is written to a terminal meanwhile. (Not a fixture: pytest puts its own stderr in place after those.)"""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TERM", "xterm")
        patched.setattr(sys, "stderr", Terminal())
        yield sys.stderr


def test_every_call_is_here():
    assert set(CALLS) == {call for rule in rules.RULES if rule.name == "progress" for call in rule.calls}


@pytest.mark.parametrize("yes", [True, np.True_], ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_true_shows_a_bar(capsys, name, yes):
    with terminal() as screen:
        do(name, progress=yes)
    shown = screen.getvalue()
    assert {"warmup": "compiling"}.get(name, "gradient" if "grad" in name else name) in shown
    assert "100%" in shown
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("no", [None, False, np.False_], ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_none_and_false_show_nothing(name, no):
    with terminal() as screen:
        do(name, progress=no)
    assert screen.getvalue() == ""


@pytest.mark.parametrize("name", CALLS)
def test_a_callable_is_called(name):
    seen = []
    with terminal() as screen:
        do(name, progress=lambda done, total, *_: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert screen.getvalue() == ""


@pytest.mark.parametrize("bad", [1, 0, "yes", []], ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_anything_else_is_refused(name, bad):
    with pytest.raises(TypeError, match="progress must be True for a bar, callable, False or None, got ") as raised:
        do(name, progress=bad)
    assert str(raised.value).endswith(repr(bad))


@pytest.mark.parametrize("name", CALLS)
def test_without_rich_the_error_says_what_to_install(monkeypatch, name):
    for module in [module for module in sys.modules if module.split(".")[0] == "rich"] + ["rich", "rich.console"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'progress=True needs rich: pip install "flash_numba\[cli\]"'):
        do(name, progress=True)
    do(name, progress=False)


def test_rich_is_imported_for_a_bar_only():
    code = """
        import sys, numpy as np, flash_numba
        q = np.zeros((2, 5, 8), np.float32)
        flash_numba.attention(q, q, q, progress=print)
        assert "rich" not in sys.modules
        flash_numba.attention(q, q, q, progress=True)
        assert "rich" in sys.modules
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("attention") == 1  # no terminal: one line at the end
    assert run.stderr.count("\n") == 1
    assert "100%" in run.stderr


@pytest.mark.parametrize(("notebook", "drawn"), [(False, 10), (True, 2)])
def test_a_bar_is_drawn_so_often_in_a_second(monkeypatch, notebook, drawn):
    """However often it is told."""
    from rich import console, live

    draws, clock = [], [0.0]
    monkeypatch.setattr(console, "_is_jupyter", lambda: notebook)
    monkeypatch.setattr(live.Live, "refresh", lambda self: draws.append(clock[0]))
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with terminal(), progress.bar("title") as report:
        for n in range(1001):
            clock[0] = n / 1000
            report(n, 1000)
        inside = [at for at in draws if at > 0]
    assert len(inside) == pytest.approx(drawn, abs=1)


def test_a_bar_ends_with_its_call(monkeypatch):
    """Also where that fails; the next one has its own."""

    def failing(*_, **__):
        raise KeyboardInterrupt

    with terminal() as screen, monkeypatch.context() as patched:
        patched.setattr(interface, "compute", failing)
        with pytest.raises(KeyboardInterrupt):
            attention(Q, Q, Q, progress=True)
    hidden, _, rest = screen.getvalue().partition("\x1b[?25l")
    assert (hidden, "\x1b[?25h" in rest) == ("", True)  # the cursor went and is back
    assert "100%" not in rest
    with terminal() as screen:
        attention(Q, Q, Q, progress=True)
    assert "100%" in screen.getvalue()


def test_a_call_without_progress_is_remembered(monkeypatch):
    monkeypatch.setattr(prepared, "_known", {})
    attention(Q, Q, Q, progress=True)
    assert not prepared._known
    attention(Q, Q, Q, progress=False)
    (kept,) = prepared._known.values()
    attention(Q, Q, Q)
    attention(Q, Q, Q, progress=False)
    assert list(prepared._known.values()) == [kept]
