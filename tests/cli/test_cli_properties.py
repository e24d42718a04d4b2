"""Files of settings, read with the rules of `java.util.Properties.load`."""

from __future__ import annotations

import contextlib
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cli import oncelog

from oncelog.cli.properties import read_properties
from oncelog.errors import ConfigError

CASES = {
    "a=1": {"a": "1"},
    "a:1": {"a": "1"},
    "a 1": {"a": "1"},
    "a\t=\t1 ": {"a": "1"},
    " \f a = = 1": {"a": "= 1"},
    "a": {"a": ""},
    "a=": {"a": ""},
    "a==:": {"a": "=:"},
    r"a\=b\:c\ d=1": {"a=b:c d": "1"},
    r"a=caf\u00e9 \uD83D\uDE00": {"a": "café 😀"},
    r"a=x\ty\\z\q": {"a": "x\ty\\zq"},
    "a=1\\\n  ,2\\\r\n\t,3\nb=4": {"a": "1,2,3", "b": "4"},
    "a=1\\\\\nb=2": {"a": "1\\", "b": "2"},
    "a=1\\\n# no comment": {"a": "1# no comment"},
    "# c\\\na=1\n! d\n\n \t\n": {"a": "1"},
    "a=1\\": {"a": "1"},
    "a=1\nb=2\na=3": {"a": "3", "b": "2"},
    "\ufeffa=1": {"a": "1"},
    "a=x\u2028y\x0cz": {"a": "x\u2028y\x0cz"},
    "p=#1!": {"p": "#1!"},
}


@pytest.mark.parametrize("text", CASES)
def test_a_file_is_read_by_the_formats_rules(text: str, tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(text.encode())
    assert read_properties(tmp_path / "c") == CASES[text]


def test_a_file_that_is_not_utf_8_is_latin_1(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes("sasl.password=café".encode("latin-1"))
    assert read_properties(tmp_path / "c") == {"sasl.password": "café"}


@pytest.mark.parametrize("text", ["a=1\n\\u00g0=2", "a=1\nb=\\ud83d", "a=1\n=2"])
def test_an_error_names_the_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "c").write_text(text)
    with pytest.raises(ConfigError, match="line 2"):
        read_properties(tmp_path / "c")
    got = oncelog("topics", "list", "--command-config", str(tmp_path / "c"))
    assert got.code == 2 and "line 2" in got.err


@pytest.mark.parametrize(
    "line", ["sasl.password=domain\\user-hunter2", "sasl.password=hunter2\\ud83d", "=hunter2"]
)
def test_an_error_does_not_show_a_password(line: str, tmp_path: Path) -> None:
    (tmp_path / "c").write_text(line)
    got = oncelog("topics", "list", "--command-config", str(tmp_path / "c"))
    assert got.code == 2 and "line 1" in got.err and "hunter2" not in got.out + got.err


@given(text=st.text("ab=: \\\t\f\n\r#!u0né"))
def test_any_text_is_read_or_refused(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("p") / "c"
    path.write_bytes(text.encode())
    with contextlib.suppress(ConfigError):
        read_properties(path)


PRINT = """
import java.io.*; import java.nio.file.*; import java.util.*;
public class Print { public static void main(String[] args) throws Exception {
    PrintStream out = new PrintStream(System.out, true, "UTF-8");
    for (String name : args) {
        Properties read = new Properties();
        try (InputStream in = Files.newInputStream(Path.of(name))) { read.load(in); }
        catch (IllegalArgumentException e) { out.println("refused"); continue; }
        StringBuilder text = new StringBuilder();
        for (Map.Entry<Object, Object> e : new TreeMap<>(read).entrySet())
            for (Object each : List.of(e.getKey(), e.getValue().toString().strip())) {
                for (char c : each.toString().toCharArray()) text.append(Integer.toHexString(c)).append(',');
                text.append(';');
            }
        out.println(text);
    } } }
"""


@pytest.mark.full("starts Java")
def test_java_reads_the_same(tmp_path: Path) -> None:
    chosen = random.Random(14)
    parts = ["a", "b", "=", ":", " ", "\\", "\t", "\f", "\n", "\r\n", "\r", "#", "!", "\\u0041", "\\n"]
    paths = []
    for number in range(400):
        paths.append(tmp_path / f"{number}.properties")
        paths[-1].write_bytes("".join(chosen.choices(parts, k=chosen.randrange(1, 24))).encode())
    (tmp_path / "Print.java").write_text(PRINT)
    command = ["java", str(tmp_path / "Print.java"), *map(str, paths)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    for path, line in zip(paths, told.splitlines(), strict=True):
        # Two differences from Java: we refuse an empty key, and we skip a lone backslash, which Java reads as
        # an empty pair.
        found = None
        with contextlib.suppress(ConfigError):
            found = read_properties(path)
        if found is None:
            assert line == "refused" or line.startswith(";"), path.read_bytes()
            continue
        cells = [",".join(f"{ord(c):x}" for c in cell) for pair in sorted(found.items()) for cell in pair]
        told_here = "".join(f"{cell}{',' if cell else ''};" for cell in cells)
        assert line.removeprefix(";;") == told_here, path.read_bytes()
