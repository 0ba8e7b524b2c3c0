from meshwright.runtime import code_versions


def test_a_changed_source_file_shows(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    before = code_versions(tmp_path)
    assert code_versions(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2")
    assert code_versions(tmp_path) != before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({before, code_versions(tmp_path), code_versions()}) == 3
    assert "torch" in before
