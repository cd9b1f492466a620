"""An adapter whose library is missing says how to install it; everything else works without."""

import subprocess
import sys

import pytest


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("library", ["torch", "grain"])
def test_the_error_has_the_pip_line(library: str) -> None:
    done = run(f"import sys; sys.modules[{library!r}] = None; import arenax_adapters.{library}")
    assert done.returncode == 1
    assert f'pip install "arenax[{library}]"' in done.stderr.splitlines()[-1]


def test_the_other_modules_need_neither() -> None:
    done = run(
        "import sys; sys.modules.update(torch=None, grain=None)\n"
        "import arenax_adapters.loop, arenax_adapters.prefetch, arenax_adapters.shared, arenax_adapters.text"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_worker_imports_has_no_jax_in_it() -> None:
    done = run(
        "import sys, arenax_adapters.shared, arenax_adapters.text\n"
        "print({m.partition('.')[0] for m in sys.modules} & {'jax', 'jaxlib', 'attr', 'arenax'})"
    )
    assert done.stdout.strip() == "set()", done.stderr


def test_nor_has_what_a_worker_of_torch_imports() -> None:
    pytest.importorskip("torch")
    done = run("import sys, arenax_adapters._torch_worker; print({'jax', 'jaxlib', 'arenax'} & {*sys.modules})")
    assert done.stdout.strip() == "set()", done.stderr
