// An answer in rounds: the model calls tools, the page runs them, and the model goes on with their results.

import { complete } from './api.js';
import { runCall } from './tools.js';

const MOST_ROUNDS = 8; // of calls in one answer

/** The model calls tools again and again. */
export class TooManyRounds extends Error {
  constructor() {
    super(`The model has called tools ${MOST_ROUNDS} times without an answer, which is as often as this page lets it.`);
  }
}

/**
 * Ask until there is an answer that calls no tool. `body()` is the request of the turn's next step,
 * `changed()` is called when the turn has grown. Returns the finish reason of the last step.
 * Throws what `complete` throws, and TooManyRounds.
 */
export async function answerInRounds(turn, body, signal, changed) {
  for (let round = 0; ; round += 1) {
    const request = body();
    const finish = await complete(request, signal, {
      bytes: () => { turn.heardAt = performance.now(); },
      delta: (delta) => { turn.add(delta); changed(); },
      tokens: (count) => { turn.step.count(count); changed(); },
    });
    const { calls } = turn.step;
    if (finish !== 'tool_calls' || !calls.length) return finish;
    if (round === MOST_ROUNDS) throw new TooManyRounds();
    for (const call of calls) runCall(call, request.tools ?? []);
    turn.next();
    changed();
  }
}
