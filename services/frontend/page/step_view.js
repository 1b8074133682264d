// A step of an answer on the page: what the model thought and said, and the tools that it called.

import { icon, make } from './dom.js';
import { TextView } from './render.js';

const STATES = { written: 'being called…', done: 'done', failed: 'failed', dropped: 'not run' };

function stateOf({ result, failed }, over) {
  if (result !== null) return failed ? 'failed' : 'done';
  return over ? 'dropped' : 'written';
}

/** A card with a call's name, its arguments as they come, and its result. */
class CallView {
  constructor() {
    this.name = make('code');
    this.state = make('span', { className: 'state' });
    this.given = make('pre', { tabIndex: 0, 'aria-label': 'Arguments' });
    this.result = make('pre', { tabIndex: 0, 'aria-label': 'Result' });
    this.gave = make('div', { className: 'gave', hidden: true }, make('span', {}, 'Result'), this.result);
    this.node = make('section', { className: 'call', 'aria-label': 'Tool call' },
      make('div', { className: 'call-head' }, icon('tool'), this.name, this.state),
      make('div', { className: 'gave' }, make('span', {}, 'Arguments'), this.given), this.gave);
  }

  paint(call, over) {
    const state = stateOf(call, over);
    this.node.dataset.state = state;
    this.state.textContent = STATES[state];
    this.name.textContent = call.name;
    this.given.textContent = call.arguments;
    this.gave.hidden = call.result === null;
    this.result.textContent = call.result ?? '';
  }
}

export class StepView {
  constructor() {
    this.said = make('div');
    this.calls = make('div', { className: 'calls' });
    this.node = make('div', { className: 'step' }, this.said, this.calls);
    this.text = new TextView(this.said);
    this.cards = [];
    this.over = false;
  }

  /** `over`: nothing of the step changes any more. */
  paint(step, over) {
    if (this.over) return;
    this.over = over;
    this.text.show(step.text, over, step.reasoning, step.thinks);
    step.calls.forEach((call, index) => {
      if (!this.cards[index]) {
        this.cards[index] = new CallView();
        this.calls.append(this.cards[index].node);
      }
      this.cards[index].paint(call, over);
    });
  }
}
