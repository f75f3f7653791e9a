"""The kernel database behind a profile: aiconfigurator-core, asked per operation and split into classes.

Only building a profile needs that package (extra `[profile]`, some 600 MB with its dependencies); it is
imported when a source is opened, never by a simulation.
"""

from __future__ import annotations

from collections import Counter
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

from fake_workers.errors import InputError
from fake_workers.pricing.exchange import Exchange, experts_of, measured_exchange
from fake_workers.pricing.known import KnownProfile
from fake_workers.pricing.kv import SparseLatent
from fake_workers.pricing.profile import Limits

PACKAGE = "aiconfigurator-core"
NODE_GPUS = 8
# Share of GPU memory that vLLM and SGLang may use, and the activation sizes it is computed for.
MEMORY_FRACTION = 0.9
MEMORY_STEP_TOKENS = 8192
MEMORY_BATCH = 256


class Parts(NamedTuple):
    """Milliseconds of one step by class."""

    attention: float
    dense: float
    moe: float


def classify(operation: str) -> str:
    """Class of an operation of the database by its name.

    attention: everything that depends on a request's own context (for latent attention the whole module with
    its projections). moe: routed experts with dispatch and combine (unless those are priced from measurements of their
    own, see `KernelSource.exchange`); in decode steps of models with shared experts the database gives the overlapped
    pair, which counts as moe. dense: the rest, tensor-parallel collectives included.
    """
    if "attention" in operation:
        return "attention"
    return "moe" if "moe" in operation else "dense"


class KernelSource:
    """One model, system, backend and layout of the database."""

    def __init__(self, known: KnownProfile) -> None:
        try:
            package = import_module("aiconfigurator_core")
            self._memory = import_module("aiconfigurator_core.sdk.memory")
            databases = import_module("aiconfigurator_core.sdk.perf_database")
            engines = import_module("aiconfigurator_core.sdk.engine")
        except ImportError as error:
            raise InputError(
                "harness profile build",
                f"building a profile needs the package {PACKAGE} ({error})",
                "install the extra: pip install '.[profile]' (Python 3.11 to 3.13)",
            ) from error
        self.known = known
        self.sparse = isinstance(known.source.kv, SparseLatent)
        layout = known.layout
        self._kwargs: dict[str, Any] = {
            "tp_size": layout.tp,
            "attention_dp_size": layout.dp,
            "moe_tp_size": layout.tp * layout.dp // layout.ep,
            "moe_ep_size": layout.ep,
        }
        if known.source.kv_dtype:
            self._kwargs["kvcache_quant_mode"] = known.source.kv_dtype
        database = databases.get_database(known.system, known.source.backend, "current")
        if database is None:
            raise InputError(
                known.name, f"no kernel data for {known.system} / {known.source.backend}", "choose another"
            )
        self.backend_version = str(database.version)
        self.package_version = metadata.version(PACKAGE)
        root = Path(str(package.__file__)).parent
        self._data = root / "systems" / "data" / known.system
        self.exchange = self._measured_exchange(root)
        try:
            self._engine = engines.EngineHandle.compile(
                known.source.source_model,
                known.system,
                known.source.backend,
                **self._kwargs,
                **dict(known.source.quant),
            )
        except Exception as error:  # the package raises many types, some of them from compiled code
            raise InputError(
                known.name, f"the kernel database cannot price it ({error})", "see its support matrix"
            ) from None
        self.origins: dict[str, Counter[str]] = {}

    def _measured_exchange(self, root: Path) -> Exchange | None:
        """Dispatch and combine of a group over several nodes, where they were measured."""
        layout = self.known.layout
        if layout.ep <= NODE_GPUS:
            return None
        model = self.known.source.source_model.replace("/", "--")
        experts = experts_of(root / "model_configs" / f"{model}_config.json")
        return None if experts is None else measured_exchange(self._data, experts, layout.ep // NODE_GPUS)

    def _split(self, operations: list[Any]) -> Parts:
        sums = {"attention": 0.0, "dense": 0.0, "moe": 0.0}
        for name, milliseconds, _energy, origin in operations:
            if self.exchange is not None and name.endswith("_dispatch"):
                continue
            sums[classify(name)] += milliseconds
            self.origins.setdefault(name, Counter())[origin] += 1
        return Parts(**sums)

    def prefill(self, new: int, cached: int = 0, batch: int = 1) -> Parts:
        """A step of `batch` equal chunks of `new` tokens on `cached` tokens each."""
        ops = self._engine.run_static_per_op(
            batch_size=batch, isl=new + cached, osl=1, prefix=cached, mode="static_ctx"
        )[0]
        return self._split(ops)

    def context_attention(self, new: int, cached: int = 0, batch: int = 1) -> float:
        """Attention of a prefill step in ms, never less than the same chunks cost without cached prefix.

        Grouped-query attention was measured without cached prefixes. The database scales full attention of
        all tokens by the share of the new ones, its launch time too, which for small chunks falls below what
        they were measured to take alone; that measurement is the floor.
        """
        attention = self.prefill(new, cached, batch).attention
        if cached and not self.sparse:
            attention = max(attention, self.prefill(new, 0, batch).attention)
        return attention

    def decode(self, batch: int, context: int) -> Parts:
        """A step of `batch` decodes of `context` tokens each, the token being computed included."""
        parts = self._split(self._engine.decode_step_per_op(batch, max(1, context - 1), 2))
        return parts if self.exchange is None else parts._replace(moe=self._experts_alone(batch))

    def _experts_alone(self, tokens: int) -> float:
        """Routed experts of a step of `tokens` tokens on every rank without dispatch and combine, in ms.

        In decode steps of models with shared experts the database gives one number: the longer of the routed path
        (router, dispatch, experts, combine) and the shared expert beside it. The same kernels stand one by one in
        its prefill steps.
        """
        routed = shared = 0.0
        operations = self._engine.run_static_per_op(batch_size=1, isl=tokens, osl=1, prefix=0, mode="static_ctx")[0]
        for name, milliseconds, _energy, _origin in operations:
            if name in ("context_moe", "context_router_gemm"):
                routed += milliseconds
            elif name.startswith("context_shared"):
                shared += milliseconds
        return max(routed, shared)

    def memory(self) -> dict[str, Any]:
        """KV budget of one rank and its derivation; tokens 0 with the reason where nothing is left."""
        basis: dict[str, Any] = {
            "rule": "gpu memory x fraction - weights - activations - runtime and collective buffers, per GPU",
            "fraction": MEMORY_FRACTION,
            "step_tokens": MEMORY_STEP_TOKENS,
            "batch": MEMORY_BATCH,
        }
        try:
            found = self._memory.estimate_kv_cache(
                self.known.source.source_model,
                self.known.system,
                self.known.source.backend,
                self.backend_version,
                max_num_tokens=MEMORY_STEP_TOKENS,
                max_batch_size=MEMORY_BATCH,
                memory_fraction_kind="of_total",
                memory_fraction_value=MEMORY_FRACTION,
                **self._kwargs,
            )
        except ValueError as error:
            return basis | {"tokens": 0, "reason": str(error)}
        return basis | {
            "gpu_bytes": found["total_gpu_capacity_bytes"],
            **found["memory_breakdown"],
            "kv_bytes": found["total_kv_size_bytes"],
            "allocated_bytes_per_token": found["kv_size_per_token_bytes"],
            "tokens": found["total_kv_size_tokens"],
        }

    def limits(self) -> Limits:
        """How far the rows were measured, read from the tables (the database extrapolates silently)."""
        sparse = self.sparse
        family = "sparse_attention" if sparse else "attention"
        context = self._table(family, "dsa_context_module_perf" if sparse else "context_attention_perf")
        decode = self._table(family, "dsa_generation_module_perf" if sparse else "generation_attention_perf")
        if sparse:
            context, decode = self._of_model(context), self._of_model(decode)
        gemm = self._table("gemm", "gemm_perf")
        new = int(context["isl"].max())
        moe_tokens = 0
        if self.known.layout.ep > 1 or "moe" in "".join(self.origins):
            moe_tokens = int(self._table("moe", "moe_perf")["num_tokens"].max())
        # Grouped-query rows have no cached prefix: the engine derives those from full attention of new +
        # cached tokens, so it stays within measurements as long as that sum does.
        cached = int(context["step"].max()) if sparse else new
        return Limits(
            new,
            cached,
            int(decode["step"].max()) + 1,
            int(decode["batch_size"].max()),
            int(gemm["m"].max()),
            moe_tokens,
        )

    def _table(self, family: str, name: str) -> Any:
        return import_module("pandas").read_parquet(
            self._data / family / self.known.source.backend / self.backend_version / f"{name}.parquet"
        )

    def _of_model(self, rows: Any) -> Any:
        wanted = self.known.source.source_model.removesuffix("-FP8")
        return rows[rows["model"].str.removesuffix("-FP8") == wanted]
