// A cart of 1 kg under a pole of 0.1 kg and 1 m, pushed by 10 N to the left (0) or the right (1): Barto, Sutton and
// Anderson (1983) without friction, by Euler's method, as gymnasium's CartPole computes it.
const GRAVITY = 9.8, CART = 1.0, POLE = 0.1, HALF_LENGTH = 0.5, FORCE = 10.0, SECONDS = 0.02;
const MASS = CART + POLE;
const FARTHEST = 2.4, STEEPEST = (12 * 2 * Math.PI) / 360; // m from the middle, radians from upright

export const framesPerSecond = 1 / SECONDS;

/** Position, its speed, the pole's angle, its speed: near upright; `random` gives numbers from 0 to 1. */
export const reset = (random) => Array.from({ length: 4 }, () => 0.1 * random() - 0.05);

/** The state after one step, its reward, and whether the pole has fallen or the cart has left. */
export function step([x, speed, angle, turn], action) {
  const force = action === 1 ? FORCE : -FORCE;
  const cos = Math.cos(angle), sin = Math.sin(angle);
  const push = (force + POLE * HALF_LENGTH * (turn * turn) * sin) / MASS;
  const turning = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4 / 3 - (POLE * (cos * cos)) / MASS));
  const acceleration = push - (POLE * HALF_LENGTH * turning * cos) / MASS;
  const state = [x + SECONDS * speed, speed + SECONDS * acceleration, angle + SECONDS * turn, turn + SECONDS * turning];
  const terminated = Math.abs(state[0]) > FARTHEST || Math.abs(state[2]) > STEEPEST;
  return { state, reward: 1, terminated };
}

export function draw(context, [x, , angle]) {
  const { width, height } = context.canvas;
  const scale = width / (2 * FARTHEST), at = width / 2 + x * scale, ground = 0.8 * height;
  context.clearRect(0, 0, width, height);
  context.lineWidth = 1;
  context.strokeStyle = "#222";
  context.beginPath();
  context.moveTo(0, ground);
  context.lineTo(width, ground);
  context.stroke();
  context.fillStyle = "#222";
  context.fillRect(at - 25, ground - 24, 50, 24);
  context.lineWidth = 9;
  context.strokeStyle = "#d55e00";
  context.beginPath();
  context.moveTo(at, ground - 24);
  context.lineTo(at + 2 * HALF_LENGTH * scale * Math.sin(angle), ground - 24 - 2 * HALF_LENGTH * scale * Math.cos(angle));
  context.stroke();
}
