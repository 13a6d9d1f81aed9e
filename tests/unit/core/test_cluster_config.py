"""The one configuration: what is taken, and what each refusal names: path, problem, nearest key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import ClusterConfig, Mode, load_config
from core.errors import ConfigError
from core.layout import Dtype


def write(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(*overrides, path=None):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value


class TestWhatIsTaken:
    def test_no_file_and_no_override_give_the_defaults(self):
        assert load_config() == ClusterConfig()

    def test_an_empty_file_gives_the_defaults(self, tmp_path):
        assert load_config(write(tmp_path, "# nothing yet\n")) == ClusterConfig()

    def test_the_file_wins_over_defaults_and_an_override_over_the_file(self, tmp_path):
        path = write(tmp_path, "mode: chunked\ndecode: {replicas: 2, kv_cache: 512MiB}\n")
        config = load_config(path, ["decode.replicas=3", "engine.dtype=bfloat16"])
        assert config.mode is Mode.CHUNKED
        assert (config.decode.replicas, config.decode.kv_cache) == (3, 512 << 20)
        assert config.engine.dtype is Dtype.BFLOAT16

    def test_the_last_of_two_overrides_of_one_key_counts(self):
        assert load_config(None, ["router.port=1", "router.port=2"]).router.port == 2

    def test_an_override_is_a_yaml_value(self):
        config = load_config(None, ["router.workers=[a:1, b:2]", "decode.cores=[4]"])
        assert config.router.workers == ("a:1", "b:2")
        assert config.decode.cores == (4,)

    def test_an_override_may_hold_an_equals_sign(self):
        assert load_config(None, ["model=/models/a=b"]).model == "/models/a=b"

    def test_an_override_of_a_section_leaves_its_alias_alone(self, tmp_path):
        path = write(tmp_path, "prefill: &pool {replicas: 1}\ndecode: *pool\n")
        config = load_config(path, ["decode.replicas=2"])
        assert (config.prefill.replicas, config.decode.replicas) == (1, 2)

    def test_sizes_are_bytes_or_strings_with_a_unit(self):
        assert load_config().decode.kv_cache is None
        assert load_config(None, ["decode.kv_cache=1MiB"]).decode.kv_cache == 1 << 20
        assert load_config(None, ["decode.kv_cache=4096"]).decode.kv_cache == 4096

    def test_nothing_can_be_written_back(self):
        with pytest.raises(ValueError, match="frozen"):
            load_config().mode = Mode.CHUNKED


class TestWhoReadsPrompts:
    def test_disaggregated_has_a_prefill_pool_even_if_none_is_written(self):
        assert load_config().prefill is None
        assert load_config().prefill_pool.replicas == 1
        assert load_config(None, ["prefill.replicas=2"]).prefill_pool.replicas == 2

    @pytest.mark.parametrize("mode", ["colocated", "chunked"])
    def test_the_other_modes_have_none(self, mode):
        assert load_config(None, [f"mode={mode}"]).prefill_pool is None

    @pytest.mark.parametrize("mode", ["colocated", "chunked"])
    def test_a_prefill_pool_that_has_no_effect_is_refused(self, mode):
        error = refusal(f"mode={mode}", "prefill.replicas=1")
        assert (error.path, error.problem) == (
            "prefill",
            f"has no effect in mode {mode}: take it out",
        )


class TestPoolsOfDifferentShapes:
    def test_a_pool_has_the_engine_s_settings_unless_it_has_its_own(self):
        config = load_config(None, ["engine.block_size=32", "prefill.block_size=8"])
        sizes = [config.engine_of(p).block_size for p in (config.prefill_pool, config.decode)]
        assert sizes == [8, 32]
        assert config.engine_of(config.decode) == config.engine

    @pytest.mark.case("B-027", "B-163")
    def test_two_formats_are_refused_unless_they_may_be_converted(self):
        error = refusal("prefill.dtype=bfloat16")
        assert error.path == "prefill.dtype"
        assert "bfloat16" in error.problem and "float32" in error.problem
        config = load_config(None, ["prefill.dtype=bfloat16", "transfer.convert_dtype=true"])
        assert config.engine_of(config.prefill_pool).dtype is Dtype.BFLOAT16

    def test_a_pool_that_does_not_exist_has_no_format(self):
        config = load_config(None, ["mode=chunked", "decode.dtype=bfloat16"])
        assert config.engine_of(config.decode).dtype is Dtype.BFLOAT16


class TestCores:
    def test_each_rank_of_each_replica_takes_its_share(self):
        settings = ["decode.replicas=2", "decode.tensor_parallel=2", "decode.cores=[3, 1, 0, 2]"]
        pool = load_config(None, settings).decode
        assert pool.num_worker_threads == 2
        assert [pool.cores_of(0), pool.cores_of(1)] == [(3, 1), (0, 2)]

    def test_each_replica_takes_its_share_in_order(self):
        pool = load_config(
            None, ["decode.replicas=2", "decode.num_threads=2", "decode.cores=[3, 1, 0, 2]"]
        ).decode
        assert [pool.cores_of(0), pool.cores_of(1)] == [(3, 1), (0, 2)]

    def test_without_cores_the_system_chooses(self):
        assert load_config().decode.cores_of(0) is None

    @pytest.mark.parametrize("cores", ["[0]", "[0, 1, 2]", "[]"])
    def test_a_wrong_number_is_refused_with_both_numbers(self, cores):
        error = refusal("decode.replicas=2", f"decode.cores={cores}")
        assert error.path == "decode"
        assert "2 replicas of 1 threads take 2" in error.problem


@pytest.mark.parametrize(
    ("override", "path", "suggestion"),
    [
        ("engin.dtype=float32", "engin", "engine"),
        ("moed=chunked", "moed", "mode"),
        ("engine.dtyp=float32", "engine.dtyp", "dtype"),
        ("prefill.replica=2", "prefill.replica", "replicas"),
        ("decode.max_num_sequence=2", "decode.max_num_sequence", "max_num_sequences"),
        ("transfer.backnd=shm", "transfer.backnd", "backend"),
        ("router.prt=1", "router.prt", "port"),
        ("engine.zzz=1", "engine.zzz", None),
        ("prefill.max_num_sequences=2", "prefill.max_num_sequences", None),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(override, path, suggestion):
    error = refusal(override)
    assert (error.path, error.problem) == (path, "is not a known key")
    assert error.suggestion == suggestion
    assert ("did you mean" in str(error)) is (suggestion is not None)


@pytest.mark.parametrize(
    ("override", "path", "problem"),
    [
        ("mode=chunkd", "mode", "'disaggregated', 'colocated' or 'chunked' (got 'chunkd')"),
        ("engine=5", "engine", "(got 5)"),
        ("engine.dtype=float16", "engine.dtype", "(got 'float16')"),
        ("engine.block_size=0", "engine.block_size", "(got 0)"),
        ("engine.nice=20", "engine.nice", "(got 20)"),
        ("engine.max_context_tokens=1", "engine.max_context_tokens", "(got 1)"),
        ("prefill.replicas=0", "prefill.replicas", "(got 0)"),
        ("prefill.max_waiting_requests=0", "prefill.max_waiting_requests", "(got 0)"),
        ("decode.max_num_sequences=3.7", "decode.max_num_sequences", "(got 3.7)"),
        ("decode.max_batch_tokens=-1", "decode.max_batch_tokens", "(got -1)"),
        ("decode.kv_cache=2XB", "decode.kv_cache", "(got '2XB')"),
        (
            "transfer.backend=rdma",
            "transfer.backend",
            "'auto', 'shm', 'ipc', 'torch' or 'nixl' (got 'rdma')",
        ),
        ("transfer.piece=1", "transfer.piece", "(got 1)"),
        ("transfer.connect_timeout_s=0", "transfer.connect_timeout_s", "(got 0)"),
        ("router.port=70000", "router.port", "(got 70000)"),
        ("router.port=x", "router.port", "(got 'x')"),
        ("router.workers=[1]", "router.workers.0", "(got 1)"),
        ("router.default_deadline_s=.nan", "router.default_deadline_s", "(got nan)"),
        ("router.drain_s=1e9", "router.drain_s", "(got '1e9')"),
        ("router={1: 2}", "router.1", "Keys should be strings (got 1)"),
        ("no-equals-sign", "no-equals-sign", "an override is written key=value"),
        ("=3", "=3", "an override is written key=value"),
        ("decode=[a", "decode", "'[a' is not a YAML value"),
        ("model=2024-99-99", "model", "'2024-99-99' is not a YAML value"),
    ],
)
def test_a_bad_value_is_refused_with_its_path_and_itself(override, path, problem):
    error = refusal(override)
    assert error.path == path
    assert error.problem.endswith(problem)
    assert error.suggestion is None


def test_an_override_below_a_plain_value_is_refused():
    error = refusal("engine.dtype=float32", "engine.dtype.x=1")
    assert (error.path, error.problem) == ("engine.dtype.x", "dtype holds no keys")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [1", "is not YAML"),
        ("mode: 2024-99-99", "is not YAML"),
        ("- mode\n", "must hold keys and values at its top"),
        ("plain", "must hold keys and values at its top"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused_by_its_name(tmp_path, text, problem):
    path = write(tmp_path, text)
    error = refusal(path=path)
    assert error.path == str(path)
    assert error.problem.startswith(problem)
    assert "\n" not in str(error)


def test_a_file_that_is_not_text_is_refused_by_its_name(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"\xff\xfe\xff")
    assert refusal(path=path).problem.startswith("is not YAML")


def test_a_file_that_is_not_there_is_refused_by_its_name(tmp_path):
    error = refusal(path=tmp_path / "missing.yaml")
    assert error.path.endswith("missing.yaml")
    assert error.problem == "cannot be read (No such file or directory)"


@given(st.lists(st.text(max_size=20) | st.builds("{}={}".format, st.text(), st.text()), max_size=3))
def test_any_override_gives_a_configuration_or_a_refusal_of_one_line(overrides):
    try:
        config = load_config(None, overrides)
    except ConfigError as error:
        assert error.path and error.problem
    else:
        assert isinstance(config, ClusterConfig)
