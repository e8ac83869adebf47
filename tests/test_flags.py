"""One parser: a line is understood whole, or refused with what was meant and what exists."""

import pytest

from nbmemprof import flags
from nbmemprof.errors import FlagError
from nbmemprof.flags import Flag

FLAGS = [
    Flag("--stacks", "frames", choices=("python", "none", "all"), default="python"),
    Flag("--save", "file", metavar="FILE", type=flags.capture_path),
    Flag("--out", "name", metavar="NAME", type=flags.identifier),
    Flag(("-q", "--quiet"), "no report", action="store_true", default=False),
]
ON = [Flag("STATE", "on or off", choices=("on", "off"), default="on")]


def refusal(line: str, known=FLAGS) -> str:
    with pytest.raises(FlagError) as error:
        flags.parse(line, known)
    return str(error.value)


def test_defaults_and_values():
    args = flags.parse("", FLAGS)
    assert (args.stacks, args.save, args.out, args.quiet) == ("python", None, None, False)
    args = flags.parse("--stacks=all -q --out cap_1", FLAGS)
    assert (args.stacks, args.out, args.quiet) == ("all", "cap_1", True)


def test_quotes_keep_spaces_and_a_tilde_is_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert flags.parse("--save '~/my run.nbmem'", FLAGS).save == tmp_path / "my run.nbmem"


def test_an_unknown_flag_is_refused_with_the_near_one_and_all_that_exist():
    text = refusal("--sav x")
    assert "'--sav'" in text
    assert "Did you mean '--save'?" in text
    assert all(name in text for name in ("--stacks python|none|all", "--out NAME", "-q, --quiet"))


def test_flags_are_not_abbreviated():
    assert "'--sta'" in refusal("--sta all")


@pytest.mark.parametrize("line", ["--host", "--driver", "--uvm"])
def test_what_is_not_built_is_refused(line):
    with pytest.raises(FlagError, match=line.split()[0]):
        flags.parse(line, flags.cell_flags())


def test_a_wrong_choice_names_the_near_one_and_all():
    text = refusal("--stacks pyton")
    assert "'pyton'" in text
    assert "Did you mean 'python'?" in text
    assert "python, none, all" in text


def test_a_missing_value_names_its_flag():
    assert "--save" in refusal("--save")
    assert "--out" in refusal("--out --save x")


@pytest.mark.parametrize("name", ["1x", "a-b", "class", "a.b", ""])
def test_out_takes_only_names(name):
    assert "--out" in refusal(f"--out '{name}'")


def test_a_word_too_many_and_open_quotes():
    assert "'surplus'" in refusal("surplus")
    assert "quotes" in refusal("--save 'open")


def test_a_save_that_can_not_work_is_refused_before_the_cell(tmp_path):
    (tmp_path / "file").write_text("")
    assert "suffix '.pkl'" in refusal(f"--save {tmp_path}/x.pkl")
    assert "does not exist" in refusal(f"--save {tmp_path}/nowhere/x.nbmem")
    assert "is a file" in refusal(f"--save {tmp_path}/file")
    assert flags.parse(f"--save {tmp_path}/new_folder", FLAGS).save == tmp_path / "new_folder"


def test_positional_words():
    assert flags.parse("", ON, prog="%memprof auto").state == "on"
    assert flags.parse("off", ON, prog="%memprof auto").state == "off"
    with pytest.raises(FlagError, match=r"%memprof auto: STATE can't be 'of'\. Did you mean 'off'"):
        flags.parse("of", ON, prog="%memprof auto")
    with pytest.raises(FlagError, match="FILE"):
        flags.parse("", [Flag("FILE", "file", optional=False)], prog="%memprof load")


def test_a_missing_file_names_its_neighbour(tmp_path):
    (tmp_path / "run_one.nbmem").write_text("")
    with pytest.raises(FlagError, match=r"Did you mean 'run_one\.nbmem'"):
        flags.existing_path(str(tmp_path / "run_on.nbmem"))


def test_nothing_ends_the_process(capsys):
    for line in ["-h", "--help", "--version", "--no-such", "-x"]:
        with pytest.raises(FlagError):
            flags.parse(line, FLAGS)
    assert capsys.readouterr() == ("", "")


def test_help_names_every_flag_with_its_default():
    text = flags.describe(FLAGS)
    assert all(name in text for flag in FLAGS for name in flag.all_names)
    assert "(default: python)" in text


def test_flags_and_verbs_are_found_by_their_place():
    known = [name for flag in flags.cell_flags() for name in flag.all_names]
    assert {"--source", "--stacks", "--out", "--save", "--view", "-q"} <= set(known)
    assert len(known) == len(set(known))
    assert {"last", "load", "save", "auto", "stats", "doctor"} <= set(flags.verbs())
    assert set(flags.verbs()) == {module.NAME for module in flags.modules("verbs").values()}
