"""The typed settings of a run: one dataclass for each section. Presets are functions that return a `Config`.

Every field is a command-line option, `--SECTION.FIELD VALUE`; the comment beside it is its help, and its type has its
range. Units: "env steps" are agent decisions, of all envs and learners of the run unless a comment says otherwise;
"learner steps" are optimizer steps of one learner. An unroll is T steps of one env, a rollout the unrolls of several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from coterie.types import Spec


class Range(NamedTuple):
    """The values that a field accepts, and the words for them in an error."""

    accepts: Callable[[Any], bool]
    text: str


_NOT_NEGATIVE = Range(lambda x: x >= 0, "must not be negative")
Positive = Annotated[int, Range(lambda x: x >= 1, "must be at least 1")]
Natural = Annotated[int, _NOT_NEGATIVE]
PositiveFloat = Annotated[float, Range(lambda x: x > 0, "must be above 0")]
NaturalFloat = Annotated[float, _NOT_NEGATIVE]
Fraction = Annotated[float, Range(lambda x: 0 <= x <= 1, "must be between 0 and 1")]
Decay = Annotated[float, Range(lambda x: 0 <= x < 1, "must be at least 0 and below 1")]

EnvId = Annotated[str, Range(lambda x: x.strip() != "", "must not be empty")]
Groups = Annotated[int, Range(lambda x: x in (0, 1, 2), "must be 0 (auto), 1 or 2")]
Sizes = Annotated[tuple[int, ...], Range(lambda x: all(n >= 1 for n in x), "sizes must be at least 1")]
Atoms = Annotated[int, Range(lambda x: x == 0 or x >= 2, "must be 0 or at least 2")]
FromMinusOne = Annotated[int, Range(lambda x: x >= -1, "must not be below -1")]
Learners = Annotated[int | Literal["auto"], Range(lambda x: x == "auto" or x >= 1, "must be at least 1, or auto")]
Actors = Annotated[int | Literal["auto"], Range(lambda x: x == "auto" or x >= 0, "must not be negative, or auto")]
RewardClip = Literal["none", "sign", "clamp", "tanh", "asymmetric"]
UpdateRule = Literal["rmsprop", "rmsprop_tf", "adam", "adam_eps_hat"]
Correction = Literal["vtrace", "one-step", "epsilon", "none"]


@dataclass(frozen=True)
class Env:
    """The environment: which, how many, and how episodes restart."""

    id: EnvId = "CartPole-v1"  # EnvPool or gymnasium id, pettingzoo/NAME, module:Id-v0, module:callable; A,B: tasks
    backend: str = "auto"  # pool: EnvPool; workers: gymnasium in worker processes; vector; package.module:callable
    num_envs: Natural = 16  # envs of each learner, agents counted one by one; auto (or 0): what keeps the cores busy
    groups: Groups = 0  # 2: one group steps while the policy acts for the other; 1: all together; 0: auto
    threads: Natural = 0  # env threads, or worker processes, of each process with envs; 0: one for each of its cores
    action_repeat: Positive = 1  # the env's steps per action, rewards added up (Atari: on top of atari.frame_skip)
    max_episode_steps: Natural = 0  # truncate episodes after this many of the env's own steps; 0: its own limit
    time_limit: Literal["truncate", "terminate"] = "truncate"  # terminate: do not bootstrap at a time limit
    decorrelate: Natural = 0  # random steps that each env takes before the run: up to this many, uniformly; not counted
    timeout: PositiveFloat = 60.0  # seconds until a worker that does not answer is replaced; well below log.stall
    on_error: Literal["fail", "replace"] = "fail"  # an exception of a gymnasium env: end the run, or replace the env
    info: Literal["episodes", "steps", "off"] = "episodes"  # metrics env/NAME: of the last step of episodes, or of all
    replace_budget: Natural = 100  # envs that may be replaced (death, NaN, time-out) in an hour
    delay: NaturalFloat = 0.0  # seconds added to each step of a group of envs, to measure the effect of stragglers
    delay_learner: FromMinusOne = -1  # the only learner whose envs are delayed; -1: all
    kwargs: str = "{}"  # JSON object: arguments of the env's constructor


@dataclass(frozen=True)
class Atari:
    """Atari's options. Other environments ignore them."""

    frame_skip: Positive = 4  # emulator frames per env step
    sticky_actions: Fraction = 0.0  # probability of repeating the last action
    noop_max: Natural = 30  # an episode begins with up to this many no-ops
    episodic_life: bool = False  # while training, a lost life ends the episode
    fire_reset: bool = True  # press FIRE at the start of an episode
    full_action_set: bool = False  # all 18 actions
    height: Positive = 84  # pixels
    width: Positive = 84  # pixels
    stack: Positive = 4  # frames in an observation


@dataclass(frozen=True)
class Reward:
    """How rewards are transformed before the loss. Logged returns are always raw."""

    clip: RewardClip = "none"  # clamp: to [-1, 1]; asymmetric: 0.3 min(tanh r, 0) + 5 max(tanh r, 0), IMPALA on DMLab
    scale: PositiveFloat = 1.0  # factor of the reward, after clip
    normalize: bool = False  # divide by the running standard deviation of the discounted return


@dataclass(frozen=True)
class Model:
    """The network."""

    torso: str = "auto"  # a3c, a3c-gae, gala, nature, nature-conv, impala, football, mlp, auto, or module:callable
    hidden: Sizes = (64, 64)  # mlp: layer sizes
    activation: Literal["tanh", "relu"] = "tanh"  # mlp: activation function
    share: Literal["auto", "yes", "no"] = "auto"  # one torso for policy and value; auto: yes for images, text, a core
    core: str = "none"  # memory before the heads: none, lstm, gru, gtrxl (a transformer), package.module:callable
    core_size: Positive = 256  # units of the core
    core_layers: Positive = 2  # gtrxl: layers
    core_heads: Positive = 4  # gtrxl: attention heads of a layer
    core_memory: Positive = 32  # gtrxl: steps that each layer remembers
    forget_bias: float = 1.0  # LSTM: initial bias of the forget gate; IMPALA and SEED RL have 1, A3C with GAE 0
    last_action_reward: bool = False  # the core also sees the last action (one-hot) and reward
    clip_last_reward: bool = True  # that reward is clipped to [-1, 1] (IMPALA); R2D2 has it as it is
    normalize_obs: bool = False  # by the running mean and standard deviation; vector observations only
    init_log_std: float = 0.0  # continuous actions: initial log standard deviation
    network: str = ""  # the whole network in place of torso, core and heads: package.module:callable
    compile: Literal["none", "default", "reduce-overhead"] = "none"  # mode of torch.compile for the training forward


@dataclass(frozen=True)
class Schedule:
    """A factor that changes over the run."""

    kind: Literal["constant", "linear", "steps"] = "constant"  # linear: from 1 to `end`; steps: `factors` from `at` on
    end: NaturalFloat = 0.0  # linear: the factor at the end of the run
    at: tuple[int, ...] = ()  # steps: when each factor begins, in units of `by`
    by: Literal["env_steps", "episodes"] = "env_steps"  # unit of `at`; episodes: only for algo.entropy_schedule
    factors: tuple[float, ...] = ()  # steps: one factor for each entry of `at`
    warmup: Natural = 0  # env steps over which the factor rises from 0 at the start


@dataclass(frozen=True)
class Algo:
    """Settings that several algorithms share."""

    unroll_length: Positive = 20  # T: env steps of each env in a rollout
    gamma: Fraction = 0.99  # discount
    gae_lambda: Fraction = 1.0  # 1: n-step returns
    value_target: Literal["gae", "n-step"] = "gae"  # a2c, ppo: advantage + value, or the n-step return (A3C with GAE)
    value_coef: NaturalFloat = 0.5  # times (target - value)^2
    entropy_coef: NaturalFloat = 0.01  # times the policy's entropy
    entropy_schedule: Schedule = Schedule()
    entropy_target: float = 0.0  # nats; entropy_coef adapts to reach it (SEED RL). 0: no adaptation
    normalize_advantage: bool = False  # a2c, ppo: within the batch; vtrace: by their running root mean square
    poll: Natural = 0  # steps of each env between updates of the acting weights; 0: once per rollout


@dataclass(frozen=True)
class PPO:
    """PPO."""

    epochs: Positive = 4  # passes over a rollout
    minibatch_size: Positive = 256  # samples of a minibatch, at least: a rollout is cut into equal ones
    clip: PositiveFloat = 0.2  # range of the probability ratio: 1 - clip to 1 + clip
    clip_schedule: Schedule = Schedule()
    clip_value: NaturalFloat = 0.0  # clip the change of the value to +-this; 0: off
    target_kl: NaturalFloat = 0.0  # stop training on a rollout once a minibatch's KL exceeds 1.5 times this; 0: off
    batch_size: Natural = 0  # samples of a rollout, in place of algo.unroll_length x envs of a batch. 0: off
    proximal: bool = False  # decoupled PPO: clip around the weights before training on a rollout, not those that acted
    rho_max: PositiveFloat = 100.0  # proximal: clip of the importance weight, proximal / acting policy


@dataclass(frozen=True)
class VTrace:
    """V-trace."""

    correction: Correction = "vtrace"  # off-policy correction (IMPALA, Table 2); its one-step has pg_rho_bar 0
    rho_bar: NaturalFloat = 1.0  # clip of the importance weight of a TD error, at least c_bar; 0: no clip
    c_bar: NaturalFloat = 1.0  # clip of the trace coefficient; 0: no clip
    pg_rho_bar: NaturalFloat = 1.0  # clip of the importance weight of the policy gradient; 0: no clip
    q_from: Literal["target", "value"] = "target"  # q_s = r + gamma v_{s+1}, or r + gamma V(x_{s+1})
    loss: Literal["mean", "sum"] = "mean"  # over batch and time; the learning rates of the papers depend on it
    minibatch: Natural = 0  # unrolls in an optimizer step, replayed ones too; 0: as many as are in a batch
    replay_capacity: Natural = 0  # unrolls kept for replay, first in first out; 0: no replay
    replay_share: Decay = 0.5  # share of replayed unrolls in an optimizer step; IMPALA has 0.5


@dataclass(frozen=True)
class Q:
    """Value learning: dqn with its variants, and r2d2; sac uses the replay's settings."""

    double: bool = True  # double Q-learning: the target network evaluates the online network's choice
    dueling: Natural = 0  # units of each stream of a dueling head; 0: no streams
    atoms: Atoms = 0  # C51: number of return values with a probability; 0: the network outputs the expected return
    v_min: float = -10.0  # C51: smallest return value
    v_max: float = 10.0  # C51: largest return value
    noisy: bool = False  # NoisyNets instead of epsilon
    n_step: Positive = 1  # rewards in a target before it bootstraps
    huber: NaturalFloat = 1.0  # the loss is linear beyond this error; 0: squared everywhere
    target_every: Positive = 10_000  # rows of a learner's rollouts between updates of the target network
    epsilon: Fraction = 1.0  # share of random actions at the start
    epsilon_end: Fraction = 0.1  # share of random actions after q.epsilon_steps
    epsilon_steps: Positive = 1_000_000  # env steps; decoupled actors keep q.epsilon until a learner trains
    ladder: NaturalFloat = 0.0  # env i of N keeps epsilon_end^(1 + ladder i / (N - 1)) (Ape-X: 7 with 0.4). 0: off
    eval_epsilon: Fraction = 0.001  # in evaluations with --sampled
    batch_size: Positive = 32  # transitions, or sequences, in an optimizer step
    intensity: PositiveFloat = 8.0  # replay ratio: how often each row of a rollout is trained on, on average
    learn_start: Natural = 20_000  # rows of its rollouts before a learner trains; resets are rows, too
    secondary_batch: Natural = 0  # batch size of a secondary learner that trains on the same replay; 0: none
    secondary_lr: NaturalFloat = 0.0  # its learning rate; 0: optim.lr


@dataclass(frozen=True)
class Replay:
    """The replay of value learning. Each learner has its own."""

    capacity: Positive = 1_000_000  # env steps, of all learners together
    envs: Natural = 0  # maximum envs per learner, including those of remote actors and hosts; 0: env.num_envs
    alpha: NaturalFloat = 0.0  # exponent of the priority; 0: uniform sampling
    beta: NaturalFloat = 0.4  # exponent of the importance weights at the start of the run
    beta_end: NaturalFloat = 1.0  # exponent of the importance weights at the end of the run
    initial: Literal["highest", "acting"] = "highest"  # priority of new data; acting: from the values while acting
    disk: str = ""  # folder of a file that stores the observations; empty: in memory
    gpu: bool = True  # store the observations on the learner's GPU, if they take at most half of its free memory
    save: bool = False  # store the replay in checkpoints; otherwise a resumed run fills it again


@dataclass(frozen=True)
class R2D2:
    """R2D2's replay of sequences. Lengths are env steps of one env, in multiples of algo.unroll_length."""

    length: Positive = 80  # steps that are trained on
    burn_in: Natural = 40  # steps before them that warm up the recurrent state
    stride: Positive = 40  # between the starts of two sequences
    eta: Fraction = 0.9  # priority: weight of a sequence's largest error; the mean error has the rest
    stored_state: bool = True  # start from the recurrent state recorded while acting; False: from zeros
    rescale: bool = True  # learn h(Q), with h(x) = sign(x)(sqrt(|x| + 1) - 1) + x / 1000


@dataclass(frozen=True)
class SAC:
    """Soft actor-critic. The replay ratio, batch size, n-step returns and learn_start are in section q."""

    tau: Fraction = 0.005  # of the way from the target critics to the trained ones, in every optimizer step
    alpha: PositiveFloat = 1.0  # weight of the entropy, at the start if it is learned
    learn_alpha: bool = True  # adapt alpha until the policy has the target entropy
    target_entropy: float | Literal["auto"] = "auto"  # nats, of a whole action; auto: minus its number of components


@dataclass(frozen=True)
class BC:
    """Behavior cloning."""

    dataset: str = ""  # Minari data set id (downloaded if missing), or a folder
    batch_size: Positive = 256  # steps of the data set in an optimizer step
    intensity: PositiveFloat = 16.0  # steps of the data set that are trained on for each env step


@dataclass(frozen=True)
class Decoupled:
    """Decoupled acting: actor processes with their own copy of the policy."""

    batch_size: Natural = 0  # B: unrolls in a learner's batch; 0: one per env
    queue: Natural = 1  # finished batches that may wait for the learner
    publish_every: Positive = 1  # learner steps between updates of the actors' weights
    lockstep: bool = False  # actors and learner take turns: no policy lag, reproducible
    restarts: Natural = 100  # of dead or hung actors that are allowed in an hour; the next one ends the run


@dataclass(frozen=True)
class Central:
    """Central acting: env hosts step envs, the learner chooses the actions."""

    batch_size: Natural = 0  # B: unrolls in a learner's batch; 0: one per env
    queue: Natural = 1  # finished batches that may wait for the learner
    lockstep: bool = False  # act for all envs at once, with the newest weights: reproducible
    restarts: Natural = 100  # of dead or hung env hosts that are allowed in an hour; the next one ends the run
    batch_min: Natural = 0  # wait for this many envs before actions are chosen; 0: do not wait
    batch_max: Natural = 0  # most envs in one forward pass; 0: no limit
    wait: NaturalFloat = 0.002  # longest wait for central.batch_min, in seconds
    newest_frame: bool = False  # remote hosts send only the newest frame of a stack; the learner restores it
    max_envs: Positive = 4096  # maximum envs per learner, including those of remote hosts


@dataclass(frozen=True)
class Wire:
    """The network service for env hosts and actors on other machines (docs/reference/wire.md)."""

    bind: str = ""  # HOST:PORT where learner 0 listens (learner k: PORT + k); empty: no service
    token_file: str = ""  # file with the clients' token; required, with TLS, unless HOST is loopback
    cert: str = ""  # TLS certificate (PEM); `coterie keys` makes token, certificate and key
    key: str = ""  # TLS key (PEM)
    max_message_mb: Positive = 64  # larger messages are refused


@dataclass(frozen=True)
class Ray:
    """Launch ray: the cluster (docs/guides/machines.md)."""

    address: str = ""  # cluster of this machine: auto, or HOST:PORT; empty: start one on this machine alone
    runtime_env: str = "{}"  # JSON object: Ray's runtime_env, such as {"working_dir": ".", "excludes": ["runs"]}
    storage: str = ""  # shared files of the run: a path, or a URL that fsspec supports; empty: in the run folder


@dataclass(frozen=True)
class Optim:
    """The optimizer."""

    rule: UpdateRule = "rmsprop"  # rmsprop_tf: eps inside the root; adam_eps_hat: eps added before bias correction
    lr: PositiveFloat = 7e-4  # learning rate
    eps: PositiveFloat = 1e-5  # added to the denominator of the update
    alpha: Decay = 0.99  # rmsprop: decay of the squared gradient
    beta1: Decay = 0.9  # adam: decay of the mean gradient
    beta2: Decay = 0.999  # adam: decay of the squared gradient
    max_grad_norm: NaturalFloat = 0.5  # largest norm of the gradient; 0: no clipping
    schedule: Schedule = Schedule()  # of the learning rate
    sqrt_scaling_from: Natural = 0  # lr grows as sqrt(all envs / this); hogwild, store: one learner's envs; 0: off
    on_nonfinite: Literal["stop", "skip"] = "stop"  # non-finite gradient: end the run, or skip and count the batch
    chunk: Natural = 0  # samples per backward pass; 0: as suits the device (a GPU: the whole batch)


@dataclass(frozen=True)
class Hogwild:
    """Exchange hogwild: shared weights without locks."""

    statistics: Literal["shared", "own"] = "shared"  # moments of the optimizer: one set, or one for each learner


@dataclass(frozen=True)
class Store:
    """Exchange store: central weights with locks."""

    chunks: Positive = 3  # parts of the weights, each with its own lock
    local_steps: Positive = 1  # learner steps between synchronizations with the store; above 1: Adam only


@dataclass(frozen=True)
class Allreduce:
    """Exchange allreduce: learners on several machines (docs/guides/linked-runs.md)."""

    bind: str = ""  # HOST:PORT of this machine, for the others to connect to
    connect: str = ""  # HOST:PORT of the machine with allreduce.bind
    machines: Positive = 2  # with allreduce.bind: machines to wait for, this one included; more may join later
    trusted_network: bool = False  # required: torch.distributed has no TLS. True: the network is private


@dataclass(frozen=True)
class Gossip:
    """Exchange gossip: learners average their weights with peers."""

    topology: Literal["auto", "ring", "exponential", "static-exponential", "bipartite", "complete"] = "auto"  # ring
    peers: Positive = 1  # ring: in-peers of each learner; exponential: peers at a time
    tau: FromMinusOne = -1  # mixes that a learner may miss before it waits for its peers; 0: lockstep; -1: no limit
    mix_every: Natural = 0  # learner steps between mixes; 0: once per rollout
    bind: str = ""  # HOST:PORT where other runs may join (docs/guides/linked-runs.md); uses wire.* keys
    connect: str = ""  # HOST:PORT of a run to join


@dataclass(frozen=True)
class Plugins:
    """Custom classes, each package.module:callable (docs/guides/custom-parts.md)."""

    acting: str = ""  # instead of the run's acting; empty: none (here and below)
    exchange: str = ""  # instead of the run's exchange
    modules: tuple[str, ...] = ()  # modules that register algorithms, acting modes and exchanges under new names


@dataclass(frozen=True)
class Chaos:
    """Fault injection: kill, stop and slow down processes of the run, and cut links to other runs."""

    every: NaturalFloat = 0.0  # mean seconds between two faults; 0: none. --chaos alone: 10
    seed: Natural = 0  # seed of the random faults


@dataclass(frozen=True)
class Eval:
    """Evaluation during training. The checkpoint with the highest score is the best one."""

    every: Natural = 0  # env steps between evaluations; 0: none
    episodes: Positive = 10  # in one evaluation
    sampled: bool = False  # sample actions instead of taking the most likely one
    max_steps: Positive = 500_000  # env steps of one evaluation; one that reaches this marks no checkpoint as best
    max_episode_steps: Natural = 0  # truncate episodes after this many of the env's own steps; 0: as in training


@dataclass(frozen=True)
class Log:
    """What a run writes."""

    every: NaturalFloat = 5.0  # seconds between lines of metrics
    stall: PositiveFloat = 900.0  # seconds without progress after which a process counts as hung and is restarted
    unsaved_limit: PositiveFloat = 3600.0  # seconds for which no checkpoint can be written until the run ends
    checkpoint_every: NaturalFloat = 120.0  # seconds between checkpoints
    checkpoint_on_warning: bool = False  # write one at SIGUSR1, too, and train on
    keep: Positive = 3  # checkpoints to keep, besides the best
    tensorboard: bool = True  # write TensorBoard events
    flight: bool = True  # record the schedule, for `coterie replay`
    digest_every: Positive = 100  # learner steps between check sums of the weights in that record
    consensus: bool = False  # gossip: measure how far the learners' weights are from their mean, and the bound on it
    cosines: Natural = 0  # env steps of each learner between comparisons of the learners' gradients; 0: none
    norms: Natural = 0  # env steps of each learner between measurements of its layers' norms; 0: none
    wandb: str = ""  # Weights & Biases project; needs the extra `wandb`
    wandb_group: str = ""  # runs of one group are shown together; empty: none
    wandb_tags: tuple[str, ...] = ()  # tags of the run's page on Weights & Biases


@dataclass(frozen=True)
class Config:
    """A run: algorithm x acting x exchange x launch, and the sections."""

    preset: str = ""  # name of the preset that the run began with
    algorithm: str = "a2c"  # a2c, ppo, vtrace, dqn, r2d2, sac, bc, a registered name, or package.module:Class
    settings: str = "{}"  # JSON object: settings of a custom algorithm; --settings.NAME VALUE sets one
    acting: str = "inline"  # inline, decoupled, central, or a registered name
    exchange: str = "auto"  # solo, allreduce, hogwild, store, gossip, a registered name; auto: solo or allreduce
    launch: Literal["local", "ray"] = "local"  # ray: on the machines of a Ray cluster
    learners: Learners = 1  # auto: one for each GPU (gossip: up to 4 on a lone one), or for each core if there are none
    actors: Actors = "auto"  # actors, or env hosts, of all learners together
    max_lag: Natural = 0  # largest policy lag: learner steps by which the weights that act may be older; 0: no limit
    restarts: Natural = 3  # of dead or hung learners that are allowed in an hour; the next one ends the run
    steps: Positive = 1_000_000  # env steps of the whole run, which ends with the rollout that reaches them
    init_from: str = ""  # folder of a run or checkpoint: begin with its network's weights and normalizers
    seed: Natural = 0  # of envs, initial weights, sampled actions and minibatches
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where learners train; auto: on GPUs if there are any
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 for images where faster, but for model.network
    graphs: bool = True  # a learner step and acting each run as one graph: of CUDA, or of TorchScript on a CPU
    deterministic: bool = False  # torch's deterministic algorithms: slower; on a GPU a replay needs them
    torch_threads: Natural = 0  # threads that share the training of a batch; 0: by the network, the batch and the cores
    callbacks: tuple[str, ...] = ()  # each package.module:callable (docs/guides/callbacks.md)
    out: str = ""  # run folder; empty: runs/PRESET-ENV-sSEED-TIME
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
    sac: SAC = field(default_factory=SAC)
    bc: BC = field(default_factory=BC)
    decoupled: Decoupled = field(default_factory=Decoupled)
    central: Central = field(default_factory=Central)
    wire: Wire = field(default_factory=Wire)
    ray: Ray = field(default_factory=Ray)
    optim: Optim = field(default_factory=Optim)
    hogwild: Hogwild = field(default_factory=Hogwild)
    store: Store = field(default_factory=Store)
    allreduce: Allreduce = field(default_factory=Allreduce)
    gossip: Gossip = field(default_factory=Gossip)
    plugins: Plugins = field(default_factory=Plugins)
    chaos: Chaos = field(default_factory=Chaos)
    eval: Eval = field(default_factory=Eval)
    log: Log = field(default_factory=Log)


@dataclass(frozen=True)
class ResolvedConfig(Config):
    """A config with the layout of the run decided: exchange, learners, actors and env.num_envs are no longer `auto`.

    Device, precision, threads, env.groups and optim.chunk may still be `auto` or 0. They depend on the cores and GPUs
    of one process, so each process decides them for itself (`Resources` in build/resources.py): an actor has no GPU;
    a remote actor, a site of a Ray cluster or a resumed run may have another machine.
    """

    exchange: str = "solo"
    learners: int = 1
    actors: int = 0  # inline acting has none


class Refusal(NamedTuple):
    """A combination of settings that cannot work: refused when `applies`, with one line that names `field`."""

    applies: Callable[[ResolvedConfig, Spec], bool]
    field: str
    reason: str
