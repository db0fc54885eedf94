"""What can be encoded: each kind of source gives ids and images, or says what is wrong with it."""

import io
import os
import tarfile

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("ray")

import pyarrow as pa
import pyarrow.parquet as pq

from flax_models.ray_data.sources import find_source
from tests.flax_models.ray_data.conftest import ids_of


def rows(source):
    table = pa.concat_tables(
        source.dataset().iter_batches(batch_size=None, batch_format="pyarrow"),
        promote_options="permissive",
    )
    return dict(zip(table["id"].to_pylist(), table["image"].to_pylist(), strict=True))


@pytest.fixture
def contents(photographs):
    return {name: (photographs / name).read_bytes() for name in ids_of(photographs)}


def write_parquet(folder, table, files=2):
    folder.mkdir()
    step = -(-table.num_rows // files)
    for number in range(files):
        pq.write_table(table.slice(number * step, step), folder / f"{number}.parquet")


def test_a_folder_a_file_and_a_list_of_paths(cluster, photographs, tmp_path, monkeypatch):
    folder = find_source(photographs)
    assert (folder.total, sorted(rows(folder))) == (20, ids_of(photographs))
    assert rows(folder)["00.jpg"] == str(photographs / "00.jpg")
    assert folder.sample(2) == [
        str(photographs / "00.jpg"),
        str(photographs / ids_of(photographs)[-1]),
    ]
    assert rows(find_source(photographs / "00.jpg")) == {"00.jpg": str(photographs / "00.jpg")}
    photographs.joinpath(os.fsdecode(b"\xff.jpg")).touch()  # of which Arrow has no string
    assert str(photographs / "\\udcff.jpg") in find_source(photographs).sample(21)
    monkeypatch.chdir(photographs)
    (tmp_path / "list.txt").write_text("00.jpg\n\nmore/deep/01.jpg\n00.jpg\n")
    paths = {name: str(photographs / name) for name in ("00.jpg", "more/deep/01.jpg")}
    assert rows(find_source(tmp_path / "list.txt")) == paths


def test_parquet_with_bytes_or_paths(cluster, contents, photographs, tmp_path):
    paths = [str(photographs / name) for name in contents]
    structs = [{"bytes": content, "path": None} for content in contents.values()]
    columns = {"key": list(range(20)), "image": list(contents.values()), "path": paths}
    write_parquet(tmp_path / "p", pa.table({**columns, "struct": structs}))
    source = find_source(tmp_path / "p", "struct", "key")
    assert source.total == 20
    assert rows(source) == {str(number): struct for number, struct in enumerate(structs)}
    assert find_source(tmp_path / "p", id_column="key").sample(2) == list(contents.values())[:2]
    assert find_source(tmp_path / "p" / "1.parquet", "path").sample(1) == paths[10:11]


def test_webdataset(cluster, contents, tmp_path):
    (tmp_path / "t").mkdir()
    for number in range(2):
        with tarfile.open(tmp_path / "t" / f"{number}.tar", "w") as tar:
            for name, content in list(contents.items())[number::2]:
                for suffix, value in (("txt", b"a text"), ("jpg", content)):
                    member = tarfile.TarInfo(f"{os.path.basename(name)[:2]}.{suffix}")
                    member.size = len(value)
                    tar.addfile(member, io.BytesIO(value))
    source = find_source(tmp_path / "t")
    found = rows(source)
    assert source.total is None
    assert len(found) == 20
    assert found["0.tar/00"] == contents["00.jpg"] == source.sample(1)[0]
    assert set(rows(find_source(tmp_path / "t" / "1.tar"))) < set(found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lance's own, as Ray calls it
def test_lance(cluster, contents, tmp_path):
    lance = pytest.importorskip("lance")
    table = pa.table({"key": list(contents), "image": list(contents.values())})
    lance.write_dataset(table, str(tmp_path / "d.lance"))
    assert rows(find_source(tmp_path / "d.lance", id_column="key")) == contents


def test_refuses_sources(photographs, tmp_path):
    table = pa.table({"key": [1, 1], "none": ["a", None], "image": [b"a", b"b"], "size": [1, 2]})
    write_parquet(tmp_path / "p", table)
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    (tmp_path / "bad.tar").write_bytes(b"no tar")
    pq.write_table(table.slice(0, 0), tmp_path / "none.parquet")
    for arguments, message in (
        (("absent",), "no such file or folder"),
        (("empty",), "no images or videos in"),
        (("blank.txt",), "no images or videos in"),
        (("binary",), "cannot read .*binary: 'utf-8' codec"),
        (("bad.parquet",), "cannot read .*bad.parquet: "),
        (("bad.tar",), "cannot read .*bad.tar: "),
        (("none.parquet", None, "key"), "no images or videos in"),
        (("photographs", "image"), "is no table, and has no columns"),
        (("p", "picture"), "has no column 'picture', only key, none, image, size"),
        (("p", None, "name"), "has no column 'name'"),
        (("p",), "column 'image' of .* holds no paths: give an --id-column"),
        (("p", None, "key"), "column 'key' of .* holds a value twice"),
        (("p", None, "none"), "column 'none' of .* has rows without a value"),
        (("p", "size"), "column 'size' of .* holds int64, neither bytes nor paths"),
    ):
        with pytest.raises(ValueError, match=message):
            find_source(tmp_path / arguments[0], *arguments[1:])
