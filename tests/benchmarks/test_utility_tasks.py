"""The utility benchmark: the records of its tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.utility.tasks import load


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train_a.tsv").write_text("sentence\tlabel\nit 's a \"charming film\t1\nbleak\t0\n", encoding="utf-8")
    (folder / "train_b.tsv").write_text("sentence\tlabel\nfine\t1\n", encoding="utf-8")
    (folder / "dev.tsv").write_text("sentence\tlabel\nso so\t0\n", encoding="utf-8")
    return folder


def test_a_task_is_read_from_a_folder_with_several_files(tmp_path):
    task = load("sst2", data_dir=str(_folder(tmp_path)), public_size=5)
    assert task.train["sentence"] == ["it 's a \"charming film", "bleak", "fine"] and task.train["labels"] == [1, 0, 1]
    assert task.evaluation["labels"] == [0] and task.labels == ["0", "1"]
    assert len(task.public) == 5 and task.public.column_names == ["sentence"]


def test_a_pair_task_keeps_both_texts_and_its_public_file(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for stem, label in (("train", "entailment"), ("train2", "not_entailment"), ("dev", "entailment")):
        (folder / f"{stem}.csv").write_text(f"question,sentence,label\nwho?,he did,{label}\n", encoding="utf-8")
    (folder / "public.csv").write_text("question,sentence\nwhy?,because\n", encoding="utf-8")
    task = load("qnli", data_dir=str(folder))
    assert task.labels == ["entailment", "not_entailment"] and task.train["labels"] == [0, 1]
    assert task.text_columns == ("question", "sentence") and task.public["sentence"] == ["because"]


def test_a_folder_that_lacks_a_split_a_column_or_a_label_is_an_error(tmp_path):
    folder = _folder(tmp_path)
    (folder / "dev.tsv").write_text("sentence\tlabel\nso so\t7\n", encoding="utf-8")
    with pytest.raises(ValueError, match="labels that no training"):
        load("sst2", data_dir=str(folder))
    with pytest.raises(ValueError, match="lack the columns"):
        load("qqp", data_dir=str(folder))
    (folder / "dev.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"dev\*"):
        load("sst2", data_dir=str(folder))
    with pytest.raises(ValueError, match="no task"):
        load("imagenet")


def test_subsets_are_public_choices_and_the_public_corpus_is_apart():
    one, other = (load("rt", train_size=50, eval_size=20, public_size=30) for _ in range(2))
    assert one.train["text"] == other.train["text"] and len(one.evaluation) == 20
    assert 0 < sum(one.train["labels"]) < 50
    tuning = load("imdb", public_size=200)
    assert len(tuning.public) == 200 and not {t.lower() for t in tuning.public["text"]} & {
        t.lower() for t in tuning.train["text"]
    }
