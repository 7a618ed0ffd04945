"""The typed config of a run. One dataclass per section; presets are functions that return a `Config`.

Every field is a command-line option: `--SECTION.FIELD VALUE`. Units: "env steps" are agent decisions summed over all
envs and learners of the run, "learner steps" are optimizer updates of one learner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from coterie.types import Spec


@dataclass(frozen=True)
class Env:
    """Which environment, how many, and how they restart."""

    id: str = "CartPole-v1"  # EnvPool id, gymnasium id, or package.module:callable
    backend: Literal["auto", "pool", "workers"] = "auto"  # pool: EnvPool; workers: gymnasium in worker processes
    num_envs: int = 16  # simulators of each learner; auto (or 0): as many as keep the cores busy
    groups: int = 0  # 2: alternate (one group steps while the other is acted on); 1: not; 0: whichever suits the env
    threads: int = 0  # env threads or worker processes of each learner; 0: one per core that it has
    action_repeat: int = 1  # times that the env takes each action, rewards added up (Atari: besides frame_skip)
    max_episode_steps: int = 0  # steps of the env before truncation; 0: the env's own limit
    time_limit: Literal["truncate", "terminate"] = "truncate"  # terminate: a time limit counts as the task's end
    decorrelate: int = 0  # most uniform-random env steps that each env takes before the run
    timeout: float = 60.0  # seconds after which a worker that does not answer is replaced
    replace_budget: int = 100  # envs that may be replaced (crash, NaN, hang) before the run fails
    delay: float = 0.0  # seconds added to each step of a group of envs, to see what stragglers do
    delay_learner: int = -1  # the only learner that is delayed; -1: all
    kwargs: str = "{}"  # JSON object handed to the env's constructor


@dataclass(frozen=True)
class Atari:
    """Atari's options; other environments ignore them."""

    frame_skip: int = 4
    sticky_actions: float = 0.0  # probability of repeating the last action
    noop_max: int = 30
    episodic_life: bool = False  # a lost life ends the episode (not the game) while training
    fire_reset: bool = True
    full_action_set: bool = False
    height: int = 84
    width: int = 84
    stack: int = 4


@dataclass(frozen=True)
class Reward:
    """What the loss sees of the reward. Logged returns are always raw."""

    clip: Literal["none", "sign", "clamp", "tanh", "asymmetric"] = (
        "none"  # clamp: to [-1, 1]; asymmetric: 0.3 min(tanh r, 0) + 5 max(tanh r, 0), IMPALA's for DMLab-30
    )
    scale: float = 1.0
    normalize: bool = False  # divide by the running deviation of the discounted return


@dataclass(frozen=True)
class Model:
    """The network."""

    torso: str = "auto"  # a3c, a3c-gae, gala, nature, impala, football, mlp, auto, or package.module:callable
    hidden: tuple[int, ...] = (64, 64)  # mlp: layer sizes
    activation: Literal["tanh", "relu"] = "tanh"  # mlp
    share: Literal["auto", "yes", "no"] = "auto"  # one torso for policy and value; auto: yes for images, text and LSTM
    core: Literal["none", "lstm"] = "none"
    core_size: int = 256
    last_action_reward: bool = False  # feed the last action (one-hot) and clipped reward to the core
    normalize_obs: bool = False  # running mean and deviation of vector observations
    init_log_std: float = 0.0  # continuous actions: initial log standard deviation
    compile: Literal["none", "default", "reduce-overhead"] = "none"  # torch.compile of the training forward


@dataclass(frozen=True)
class Schedule:
    """A factor over the run: `constant`, `linear` from 1 to `end`, or `steps` (factors[i] from env step at[i] on)."""

    kind: Literal["constant", "linear", "steps"] = "constant"
    end: float = 0.0  # linear: factor at the end of the run
    at: tuple[int, ...] = ()  # steps: env steps, or episodes
    by: Literal["env_steps", "episodes"] = "env_steps"  # what `at` counts; episodes only for algo.entropy_schedule
    factors: tuple[float, ...] = ()  # steps: one for each `at`
    warmup: int = 0  # env steps over which the factor first grows from 0


@dataclass(frozen=True)
class Algo:
    """What the actor-critic algorithms share."""

    unroll_length: int = 20  # T, env steps per env and rollout
    gamma: float = 0.99
    gae_lambda: float = 1.0  # 1: n-step returns
    value_coef: float = 0.5  # times (target - value)^2
    entropy_coef: float = 0.01
    entropy_schedule: Schedule = Schedule()
    entropy_target: float = 0.0  # nats; entropy_coef is then adapted towards it (SEED RL). 0: it stays
    normalize_advantage: bool = False  # a2c, ppo: over the batch; vtrace: by the running deviation
    poll: int = 0  # env steps of each env after which acting takes the newest weights; 0: once for each rollout


@dataclass(frozen=True)
class PPO:
    """PPO's own."""

    epochs: int = 4
    minibatch_size: int = 256  # samples
    clip: float = 0.2
    clip_schedule: Schedule = Schedule()
    clip_value: float = 0.0  # clip the value's move to +-this; 0: off
    target_kl: float = 0.0  # stop the epochs of a rollout when KL passes this; 0: off
    batch_size: int = 0  # samples per rollout: T shrinks to batch_size / num_envs as envs are added; 0: T stays


@dataclass(frozen=True)
class VTrace:
    """V-trace's own."""

    correction: Literal["vtrace", "one-step", "epsilon", "none"] = "vtrace"  # the comparison of IMPALA, Table 2
    rho_bar: float = 1.0  # most that a temporal difference counts; not below c_bar. 0, as below: no limit
    c_bar: float = 1.0  # most that a trace passes on
    pg_rho_bar: float = 1.0  # most that a policy gradient counts
    q_from: Literal["target", "value"] = "target"  # q_s = r + gamma v_{s+1}, or r + gamma V(x_{s+1})
    loss: Literal["mean", "sum"] = "mean"  # over the batch and time; the papers' learning rates differ by it
    minibatch: int = 0  # new rollouts (of one env each) in each optimizer step; 0: the whole batch in one
    replay_capacity: int = 0  # rollouts (of one env each) kept for replay, the oldest leave first; 0: none
    replay_share: float = 0.5  # of each batch; 0.5: as many old rollouts as new ones, which is the paper's


@dataclass(frozen=True)
class Q:
    """Value learning: dqn with its variants, and r2d2."""

    double: bool = True  # the online network chooses the next action, the target network judges it
    dueling: int = 0  # units of each stream of a dueling head; 0: one layer and no streams
    atoms: int = 0  # C51: returns that have a probability each; 0: the network tells the expected return
    v_min: float = -10.0  # C51: the least and the most of them
    v_max: float = 10.0
    noisy: bool = False  # NoisyNets instead of epsilon
    n_step: int = 1
    huber: float = 1.0  # error from which the loss is linear; 0: squared everywhere
    target_every: int = 10_000  # env steps of a learner between two copies of the target network
    epsilon: float = 1.0  # share of random actions at the beginning
    epsilon_end: float = 0.1  # and after `epsilon_steps`
    epsilon_steps: int = 1_000_000  # env steps of the whole run
    ladder: float = 0.0  # env i of N acts with epsilon_end^(1 + ladder i / (N - 1)) instead (Ape-X: 7, with 0.4)
    eval_epsilon: float = 0.001  # of evaluations with --sampled
    batch_size: int = 32  # transitions, or sequences, in an optimizer step
    intensity: float = 8.0  # times that each env step is trained on
    learn_start: int = 20_000  # env steps of a learner before it trains
    secondary_batch: int = 0  # batch size of a secondary learner, which trains from this one's replay only; 0: none
    secondary_lr: float = 0.0  # its learning rate; 0: optim.lr


@dataclass(frozen=True)
class Replay:
    """What value learning keeps of the past, each learner its own."""

    capacity: int = 1_000_000  # env steps, of all learners together
    envs: int = 0  # most simulators that a learner has, with those of hosts and actors that come; 0: env.num_envs
    alpha: float = 0.0  # priority's exponent; 0: all are equally likely
    beta: float = 0.4  # of the importance weights at the beginning of the run
    beta_end: float = 1.0  # and at its end
    initial: Literal["highest", "acting"] = "highest"  # priority of what is new; acting: by the values of who acted
    disk: str = ""  # folder for a file that holds the observations; empty: in memory
    save: bool = False  # in every checkpoint; otherwise a resumed run gathers it anew


@dataclass(frozen=True)
class R2D2:
    """Replay of sequences. Lengths are in env steps, and multiples of algo.unroll_length."""

    length: int = 80  # trained on
    burn_in: int = 40  # before that, to warm the recurrent state up
    stride: int = 40  # between the beginnings of two sequences
    eta: float = 0.9  # weight of the largest error of a sequence in its priority, beside the mean
    stored_state: bool = True  # begin with the state that acting had; False: with zeros
    rescale: bool = True  # learn h(Q), h(x) = sign(x)(sqrt(|x| + 1) - 1) + x / 1000


@dataclass(frozen=True)
class Decoupled:
    """Actors with their own copy of the policy."""

    batch_size: int = 0  # B, rollouts (of one env each) in a learner's batch; 0: as many as it has simulators
    queue: int = 1  # batches that may wait for the learner, besides those being trained on and filled
    publish_every: int = 1  # learner steps between two publications of the weights
    lockstep: bool = False  # actors wait for the learner and it for them: no lag, and the same run twice
    lag_alarm: int = 0  # learner steps of policy_lag from which the log says so; 0: never
    restarts: int = 100  # actors that may die, and are started again, before the run fails


@dataclass(frozen=True)
class Central:
    """Env hosts whose actions the learner chooses."""

    batch_size: int = 0  # B, rollouts (of one env each) in a learner's batch; 0: as many as it has simulators
    queue: int = 1  # batches that may wait for the learner, besides those being trained on and filled
    lockstep: bool = False  # all envs are acted on at once, with the weights of the last batch: the same run twice
    lag_alarm: int = 0  # learner steps of policy_lag from which the log says so; 0: never
    restarts: int = 100  # hosts that may die, and are started again, before the run fails
    batch_min: int = 0  # envs that are waited for before actions are chosen; 0: whoever asks is answered
    batch_max: int = 0  # most envs whose actions are chosen at once; 0: no limit
    wait: float = 0.002  # seconds that batch_min is waited for, from the first who asks
    newest_frame: bool = False  # send only the newest frame of a stack, which is put together on the learner
    max_envs: int = 4096  # of one learner, with those of hosts that come by themselves


@dataclass(frozen=True)
class Wire:
    """The network: hosts and actors on other machines (docs/wire.md)."""

    bind: str = ""  # HOST:PORT at which learner 0 listens, learner k at PORT + k; empty: nobody else can connect
    token_file: str = ""  # what clients must know; with TLS required where HOST is not loopback
    cert: str = ""  # TLS: certificate and key (PEM); `coterie keys` makes all three
    key: str = ""
    max_message_mb: int = 64  # larger frames are refused, far larger ones before they are read


@dataclass(frozen=True)
class Ray:
    """With launch ray: the cluster (docs/nodes.md)."""

    address: str = ""  # of a cluster that this machine belongs to: auto, or HOST:PORT; empty: this machine alone
    runtime_env: str = "{}"  # JSON object for Ray, such as {"working_dir": "."} for code of your own
    storage: str = ""  # the run's files, for all machines: a path, or a URL of fsspec's; empty: the run folder


@dataclass(frozen=True)
class Optim:
    """The update rule."""

    rule: Literal["rmsprop", "rmsprop_tf", "adam", "adam_eps_hat"] = (
        "rmsprop"  # _tf: eps inside the root; eps_hat: eps added before bias correction
    )
    lr: float = 7e-4
    eps: float = 1e-5
    alpha: float = 0.99  # rmsprop: decay of the squared gradient
    beta1: float = 0.9
    beta2: float = 0.999
    max_grad_norm: float = 0.5  # 0: no clipping
    schedule: Schedule = Schedule()
    sqrt_scaling_from: int = (
        0  # simulators at which lr holds; lr grows with the root of all learners' simulators. 0: off
    )
    on_nonfinite: Literal["stop", "skip"] = "stop"  # a non-finite gradient: end the run, or skip that batch (counted)
    chunk: int = 0  # samples per backward pass; 0: what suits the device, whole batch on a GPU


@dataclass(frozen=True)
class Hogwild:
    """Lock-free shared weights."""

    statistics: Literal["shared", "own"] = "shared"  # the update rule's moments: of all workers, or each its own


@dataclass(frozen=True)
class Store:
    """The central store."""

    chunks: int = 3  # parts of the weights, each under a lock of its own
    local_steps: int = 1  # learner steps between two meetings with the store; more than 1: Adam only
    fixed_turns: bool = False  # learners meet the store in a fixed order: the same run twice, at the slowest's pace


@dataclass(frozen=True)
class Allreduce:
    """Learners on other machines whose gradients count as well (docs/learners.md)."""

    bind: str = ""  # HOST:PORT of this machine at which the others meet
    connect: str = ""  # HOST:PORT of the machine where they do
    machines: int = 2  # with bind: so many are awaited, itself included; more may come later
    trusted_network: bool = False  # torch.distributed has no TLS and no token: true says that the network is your own

    @property
    def address(self) -> str:
        """Where the machines meet; empty where there is but one."""
        return self.bind or self.connect


@dataclass(frozen=True)
class Gossip:
    """Learners that average with their peers."""

    # A JSON file has matrices; auto is ring, and complete where others may join.
    topology: str = "auto"  # auto, ring, exponential, static-exponential, bipartite, complete, or a JSON file
    peers: int = 1  # ring: in-peers of each learner; exponential: peers at a time
    tau: int = -1  # mixes that a learner may miss before it waits for its peers; 0: lockstep; -1: any
    mix_every: int = 0  # learner steps between mixes; 0: once for each rollout
    bind: str = ""  # HOST:PORT at which runs on other machines may join (docs/learners.md), with wire's token and keys
    connect: str = ""  # HOST:PORT of such a run, with whose learners this run's gossip
    seats: int = 0  # with bind: most learners, here and elsewhere; 0: 8 more than here


@dataclass(frozen=True)
class Own:
    """User-defined parts (docs/extend.md): substitutes for the run's, each package.module:callable. Empty: none."""

    algorithm: str = ""  # --algorithm package.module:callable says the same, and so on
    acting: str = ""
    exchange: str = ""
    modules: tuple[str, ...] = ()  # that register actings and exchanges under names of their own


@dataclass(frozen=True)
class Chaos:
    """Faults on purpose: processes of the run are killed, stopped and slowed, links to other runs are cut."""

    every: float = 0.0  # seconds between two of them on average; 0: none. --chaos alone: 10
    seed: int = 0


@dataclass(frozen=True)
class Eval:
    """Evaluation while training, on envs of its own. It decides which checkpoint is best."""

    every: int = 0  # env steps between evaluations; 0: none
    episodes: int = 10
    sampled: bool = False  # sample actions instead of taking the likeliest
    max_steps: int = 500_000  # env steps that one evaluation may take; one that is cut short marks no checkpoint best
    max_episode_steps: int = 0  # env steps; 0: the env's own limit


@dataclass(frozen=True)
class Log:
    """What a run writes."""

    every: float = 5.0  # seconds between metrics lines
    stall: float = 900.0  # seconds without a rollout or an evaluated step after which the run ends with a diagnosis
    checkpoint_every: float = 120.0  # seconds between checkpoints
    keep: int = 3  # checkpoints kept besides the best
    tensorboard: bool = True
    cosines: int = 0  # env steps of each learner between two comparisons of the learners' gradients; 0: none
    norms: int = 0  # env steps of each learner between two looks at its layers' norms; 0: none
    wandb: str = ""  # project name; needs the extra `wandb`


@dataclass(frozen=True)
class Config:
    """A run: algorithm x acting x exchange x launch, and the sections."""

    preset: str = ""
    algorithm: Literal["a2c", "ppo", "vtrace", "dqn", "r2d2"] = "a2c"
    acting: str = "inline"  # inline, decoupled, central, or a registered name
    exchange: str = "auto"  # solo, allreduce, hogwild, store, gossip, or a registered name; auto: solo, or allreduce
    launch: Literal["local", "ray"] = "local"  # ray: on the machines of a Ray cluster
    learners: int | Literal["auto"] = 1  # auto: one for each core, or for each GPU where there are any
    actors: int | Literal["auto"] = "auto"  # actors, or env hosts, of all learners together
    restarts: int = 3  # learners that may be killed, and are started again, before the run fails
    steps: int = 1_000_000  # env steps of the whole run
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 where the device has it, for image torsos
    torch_threads: int = 0  # threads that train parts of a batch side by side; 0: one per core for images, else 1
    out: str = ""  # run folder; empty: runs/PRESET-ENV-TIME
    env: Env = field(default_factory=Env)
    atari: Atari = field(default_factory=Atari)
    reward: Reward = field(default_factory=Reward)
    model: Model = field(default_factory=Model)
    algo: Algo = field(default_factory=Algo)
    ppo: PPO = field(default_factory=PPO)
    vtrace: VTrace = field(default_factory=VTrace)
    q: Q = field(default_factory=Q)
    replay: Replay = field(default_factory=Replay)
    r2d2: R2D2 = field(default_factory=R2D2)
    decoupled: Decoupled = field(default_factory=Decoupled)
    central: Central = field(default_factory=Central)
    wire: Wire = field(default_factory=Wire)
    ray: Ray = field(default_factory=Ray)
    optim: Optim = field(default_factory=Optim)
    hogwild: Hogwild = field(default_factory=Hogwild)
    store: Store = field(default_factory=Store)
    allreduce: Allreduce = field(default_factory=Allreduce)
    gossip: Gossip = field(default_factory=Gossip)
    own: Own = field(default_factory=Own)
    chaos: Chaos = field(default_factory=Chaos)
    eval: Eval = field(default_factory=Eval)
    log: Log = field(default_factory=Log)


@dataclass(frozen=True)
class ResolvedConfig(Config):
    """A config without `auto`, made once for a run by `coterie.build.resources.resolve_config`."""

    exchange: str = "solo"
    learners: int = 1
    actors: int = 0  # inline acting has none


class Refusal(NamedTuple):
    """A combination of settings that cannot work: refused when `applies`, with one line that names `field`."""

    applies: Callable[[ResolvedConfig, Spec], bool]
    field: str
    reason: str
