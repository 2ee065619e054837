"""benchmarks/sections.py: one page holds the sections of several commands."""

from sections import write_section


def test_a_section_is_replaced_in_its_place_and_a_new_one_comes_last(tmp_path):
    page = tmp_path / "speed.md"
    page.write_text("# Speed\n\nintro\n\n## One\n\nold\n\n### part\n\n## Two\n\nkept\n")
    write_section(page, "# One\n\nnew\n\n## part of it\n")
    write_section(page, "# Three\n\nadded\n")
    assert page.read_text() == (
        "# Speed\n\nintro\n\n## One\n\nnew\n\n### part of it\n\n## Two\n\nkept\n\n## Three\n\nadded\n"
    )
