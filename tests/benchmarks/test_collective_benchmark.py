"""The collective benchmark runs, on a small model, and writes its section and plot."""

import pytest
from test_torch_benchmarks import check_written, run, tables


@pytest.mark.slow
def test_an_exchange_is_compared_with_a_bare_all_reduce(tmp_path):
    (tmp_path / "collective.md").write_text("# How to\n\nRead this.\n\n## What an exchange costs\n")
    printed = run("collective.py", "--quick", out=tmp_path)
    page = check_written(tmp_path, "collective")
    assert page.startswith("# How to\n\nRead this.\n\n## What an exchange costs\n\nMade by ")
    assert page.count("## What") == 1
    targets, figures = tables(page)
    assert [mark for mark, *_ in targets] == ["?"] * 2  # they are about 25 M parameters
    assert [row[:2] for row in figures] == [["2", "averaging"], ["2", "elastic"]]
    for _, _, bare, exchange, ratio, _, adding, around, memcpys in figures:
        assert min(map(float, (bare, exchange, ratio, adding, around, memcpys))) > 0
        assert float(adding) < float(exchange)
    assert printed.count("target: at most") == 2
