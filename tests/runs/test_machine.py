from coterie.runs.machine import required, version


def test_required_packages_are_listed_by_extra():
    packages = required()
    assert packages[""][:2] == ["torch", "numpy"]
    assert packages["ray"] == ["ray"]
    assert version("torch")
    assert version("no-such-package") is None


def test_the_extra_of_a_required_package_counts():
    """gymnasium is always required: MuJoCo shows whether its extra is installed."""
    assert "mujoco" in required()["gym"]
    assert "gymnasium" not in required()["gym"]
    assert "imageio-ffmpeg" in required()["video"]
    assert all(version(name) for name in required()["gym"])  # `make test` installs it: none is another Python's
