"""What others name, such as files, classes, runs and values, is only text: on a terminal, in Markdown."""

import pytest

from lockstep.config.formatting import inline
from lockstep.extras.render import MARKDOWN, code
from lockstep.extras.tables import list_errors

HOSTILE = [
    "a\x1b[2Jb", "a\x1b]0;title\x07b", "a\nrm -rf b", "a\r\nb", "a\tb", "a\x00b", "a\u202eb", "a\u2028b", "a\x9b2Jb", "\ud800",
    "$(touch X)", "`touch X`", "a'b", 'a"b', "a; touch X", "a\\", "-rf", "#a", "~", "*", "a && touch X", "", " ",
    "<script>alert(1)</script>", "[a](javascript:b)", "![a](http://b)", "a|b", "&lt;", "```", "a``b`", "**a**", "=1+1", "@SUM(A1)",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_name_is_only_text_everywhere(text):
    line = inline(text)
    assert all(c.isprintable() or c == " " for c in line)
    assert inline(line) == line
    assert len(list_errors([(text, text)], 1).splitlines()) == 2
    page = MARKDOWN.from_string("# {{ name }}\n\n| {{ name }} |\n\n{{ name | code }}").render(name=text)
    title, row, _ = (part for part in page.split("\n\n"))
    assert "<" not in title and "\n" not in title
    assert row.replace("\\|", "").count("|") == 2
    assert "`" not in title.replace("\\`", "") and "[" not in title.replace("\\[", "")
    assert str(code(text)).strip("`").strip() == line.strip("`").strip() or "`" in line
