"""The TensorFlow benchmark runs, on small models, and writes its page and plot."""

import pytest
from test_torch_benchmarks import check_written, run, tables


@pytest.mark.slow
def test_tensorflow_step_compares_with_the_bare_optimizer_and_the_wire(tmp_path):
    printed = run("tensorflow_step.py", "--quick", out=tmp_path)
    targets, figures = tables(check_written(tmp_path, "tensorflow-step"))
    assert len(targets) == 5
    assert len(figures) == 10
    for cluster, way, bare, local, *_, exchange, ratio in figures:
        assert cluster.startswith(("3 × 10,000", "50 × 256"))
        assert way in ("hook", "operation alone")
        assert float(bare) > 0
        assert float(local) > 0
        assert (float(exchange) > 0) == (float(ratio) > 0)
    assert printed.count("target: at most") == 5
