from coterie.runs.versions import needed, version


def test_required_packages_are_listed_by_extra():
    packages = needed()
    assert packages[""][:2] == ["torch", "numpy"]
    assert packages["ray"] == ["ray"]
    assert version("torch")
    assert version("no-such-package") is None


def test_an_extra_of_another_package_is_what_that_one_needs():
    """gymnasium is there in any case: it is MuJoCo that tells whether the extra is."""
    assert "mujoco" in needed()["gym"]
    assert "gymnasium" not in needed()["gym"]
    assert "imageio-ffmpeg" in needed()["video"]
    assert all(version(name) for name in needed()["gym"])  # `make test` installs it: none is another Python's
