"""Bytes of a rank to bounded lines."""

import pytest

from ddplab import capture
from ddplab.events import Line, Omitted, Started


def cut(*chunks: bytes) -> list[str]:
    """The lines of a stream that wrote ``chunks`` and ended."""
    buffer = capture.LineBuffer()
    return [line for chunk in chunks for line in buffer.feed(chunk)] + buffer.finish()


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"par", b"tial"], ["partial"]),
        ([b"\xc3", b"\xa9\n"], ["é"]),
        ([b"\xff\xfe\n"], ["\\xff\\xfe"]),
        ([b"1%\r2%\r", b"3%\n"], ["3%"]),
        ([b"1%\r2%\r"], ["2%"]),
        ([b"dos\r\n"], ["dos"]),
        ([b"\n\n"], ["", ""]),
        ([b"\x00\n"], ["\x00"]),
        ([], []),
    ],
)
def test_lines_come_out_as_a_terminal_shows_them(chunks: list[bytes], lines: list[str]) -> None:
    """Chunks may end anywhere; a carriage return starts the line again; odd bytes are shown as escapes."""
    assert cut(*chunks) == lines


def test_a_long_line_keeps_its_beginning_and_end() -> None:
    """Ten megabytes without a line end take a few kilobytes, and say what is missing."""
    (line,) = cut(b"start", *[b"x" * 100_000] * 100, b"end")
    assert line.startswith("startxxx")
    assert line.endswith("xxxend")
    assert "characters left out" in line
    assert len(line) < 2 * capture.MAX_LINE


def test_a_flood_keeps_its_beginning_and_end() -> None:
    """Of a million lines the first and the last stay, in order, with a note between them; other events stay all."""
    transcript = capture.Transcript()
    transcript.add([Started(0, 0.0, 1)])
    for number in range(1_000):
        transcript.add([Line(0, 0.1, "stdout", str(1_000 * number + step)) for step in range(1_000)])
    transcript.add([Line(0, 0.1, "stderr", "other"), Started(1, 0.2, 2)])
    events = transcript.events()
    texts = [event.text if isinstance(event, Line) else type(event).__name__ for event in events]
    half = capture.MAX_LINES // 2
    assert texts[:2] == ["Started", "0"]
    assert texts[half + 1] == "Omitted"
    assert texts[-3:] == ["999999", "other", "Started"]
    assert [e.num_lines for e in events if isinstance(e, Omitted)] == [1_000_000 - capture.MAX_LINES]
