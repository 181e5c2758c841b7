import pytest

from kldwrm_jax.experiments.errors import UsageError, check_names


def test_known_names_pass():
    check_names("--optimizer", ["kfac", "q"], {"kfac": 1, "so": 2, "q": 3})


def test_an_unknown_name_is_named_with_its_flag_and_the_known_ones():
    with pytest.raises(UsageError, match=r"--optimizer.*'kfca'.*kfac.*so"):
        check_names("--optimizer", ["kfac", "kfca"], {"kfac": 1, "so": 2})
