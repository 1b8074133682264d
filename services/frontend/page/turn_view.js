// A turn on the page. It is painted from the turn's state, at most once a frame.

import { copy, make } from './dom.js';
import { StepView } from './step_view.js';

const quiet = (label, act) => {
  const button = make('button', { type: 'button', className: 'quiet small' }, label);
  button.addEventListener('click', () => act(button));
  return button;
};

export class TurnView {
  /** `acts`: `edit(turn, question)` and `again(turn)`; both return whether it was sent. */
  constructor(turn, acts) {
    this.turn = turn;
    this.acts = acts;
    this.asked = make('div', { className: 'asked' });
    this.question = make('article', { className: 'question', 'aria-label': 'Question' }, this.asked);
    this.text = make('div', { className: 'text' });
    this.notice = make('div', { className: 'notice', hidden: true });
    this.stats = make('p', { className: 'stats' });
    this.copy = quiet('Copy', (button) => copy(turn.text || turn.thought, button));
    this.again = quiet('Regenerate', () => acts.again(turn));
    this.foot = make('div', { className: 'foot' }, this.stats, make('div', { className: 'tools' }, this.copy, this.again));
    this.answer = make('article', { className: 'answer', 'aria-label': 'Answer' }, this.text, this.notice, this.foot);
    this.nodes = [this.question, this.answer];
    this.steps = [];
    this.showQuestion();
    this.paint();
  }

  paint() {
    const { turn } = this;
    const ended = turn.state === 'ended';
    this.answer.dataset.state = turn.state;
    this.answer.setAttribute('aria-busy', String(!ended));
    turn.steps.forEach((step, index) => this.paintStep(step, index, ended || step !== turn.step));
    if (!ended) turn.measure();
    this.stats.textContent = turn.summary;
    this.foot.hidden = !ended && !turn.summary;
    this.copy.hidden = !turn.text && !turn.thought;
    this.say();
    this.again.hidden = Boolean(turn.notice?.retry); // the notice has a button that does the same
  }

  paintStep(step, index, over) {
    if (!this.steps[index]) {
      this.steps[index] = new StepView();
      this.text.append(this.steps[index].node);
    }
    this.steps[index].paint(step, over);
  }

  /** A message below the text, with a button to try again where that may help. */
  say() {
    const { notice } = this.turn;
    this.notice.hidden = !notice;
    if (!notice || this.said === notice) return;
    this.said = notice;
    this.notice.dataset.kind = notice.retry ? 'error' : 'wait';
    this.notice.replaceChildren(make('p', {}, notice.message));
    if (!notice.retry) return;
    const button = make('button', { type: 'button', className: 'retry' }, 'Try again');
    button.addEventListener('click', () => this.acts.again(this.turn));
    this.notice.append(button);
  }

  showQuestion() {
    const { question } = this.turn;
    this.edit = quiet('Edit', () => this.change());
    this.edit.setAttribute('aria-label', 'Edit the question');
    this.asked.replaceChildren(make('p', {}, question),
      make('div', { className: 'tools' }, quiet('Copy', (button) => copy(question, button)), this.edit));
  }

  /** The question as a field, to be sent again. */
  change() {
    const field = make('textarea', { value: this.turn.question, 'aria-label': 'Edit the question' });
    field.rows = Math.min(8, Math.max(2, field.value.split('\n').length));
    const send = make('button', { type: 'submit', className: 'primary small' }, 'Send');
    const back = () => {
      this.showQuestion();
      this.edit.focus();
    };
    const form = make('form', { className: 'edit' }, field,
      make('div', { className: 'tools' }, quiet('Cancel', back), send));
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      if (field.value.trim() && this.acts.edit(this.turn, field.value)) this.showQuestion();
    });
    field.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') {
        event.stopPropagation();
        back();
      } else if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.asked.replaceChildren(form);
    field.focus();
  }
}
