// The shown conversation: asking, and the answers as they stream in.

import { ConnectionLost, KeyMissing } from './api.js';
import { Conversation } from './conversation.js';
import { announce, byId, make } from './dom.js';
import { answerInRounds } from './rounds.js';
import { toast } from './toast.js';
import { Turn } from './turn.js';
import { TurnView } from './turn_view.js';

const SILENT_MS = 15_000; // the server sends a comment every 10 s while a stream waits
const MOST_BUSY = 4; // browsers open six connections to a server
const PAINT_SHARE = 4; // after a frame that took long to make, wait four times as long

export class Chat {
  /**
   * `request()` gives the parameters of the next request and the system prompt, or null where a
   * setting is wrong; `onBusy(busy)` and `onLost()` are called as their names say.
   */
  constructor({ library, first, request, onBusy, onLost, onShown }) {
    Object.assign(this, { library, request, onBusy, onLost, onShown });
    this.log = byId('log');
    this.welcome = byId('welcome');
    this.follows = true;
    this.acts = {
      again: (turn) => this.again(turn, turn.question),
      edit: (turn, question) => this.again(turn, question),
    };
    this.log.addEventListener('scroll', () => {
      const { scrollHeight, scrollTop, clientHeight } = this.log;
      this.follows = scrollHeight - scrollTop - clientHeight < 48;
    }, { passive: true });
    this.show(first);
  }

  get busy() { return this.current.busy; }

  /** Show a conversation. What is written in another goes on. */
  show(conversation) {
    for (const turn of this.current?.turns ?? []) turn.view = null; // no turn is painted unseen
    this.current = conversation;
    this.log.replaceChildren();
    if (!conversation.turns.length) this.log.append(this.welcome);
    if (conversation.cut) this.log.append(make('p', { className: 'help' }, 'The beginning of this chat was too long for this browser to keep.'));
    for (const turn of conversation.turns) this.place(turn);
    this.library.select(conversation);
    this.onBusy(conversation.busy);
    this.onShown(conversation);
    this.follows = true;
    this.scroll();
  }

  place(turn) {
    this.welcome.remove();
    turn.view = new TurnView(turn, this.acts);
    this.log.append(...turn.view.nodes);
  }

  /** Ask. False where nothing was sent. */
  ask(question) {
    if (this.busy || !question.trim()) return false;
    return this.answer(new Turn(question));
  }

  /** Ask a question of the conversation again; what follows it is dropped, and can be had back. */
  again(turn, question) {
    const conversation = this.current;
    if (this.busy) return false;
    const before = conversation.record();
    const at = conversation.turns.indexOf(turn);
    const { turns } = conversation;
    const dropped = turns.slice(at);
    conversation.turns = turns.slice(0, at);
    if (!this.answer(new Turn(question))) {
      conversation.turns = turns;
      return false;
    }
    for (const one of dropped) {
      for (const node of one.view.nodes) node.remove();
      one.view = null;
    }
    if (dropped.some((one) => !one.empty)) toast('The earlier answer was replaced.', 'Undo', () => this.restore(conversation, before));
    return true;
  }

  restore(conversation, record) {
    conversation.stopper?.abort();
    conversation.stopper = null;
    conversation.turns = Conversation.from(record.id, record).turns;
    this.library.touch(conversation);
    if (this.current === conversation) this.show(conversation);
  }

  stop() {
    this.current.stopper?.abort();
  }

  /** Answer a new turn of the shown conversation. False where nothing was sent. */
  answer(turn) {
    const conversation = this.current;
    const busy = this.library.newestFirst.filter((one) => one.busy).length;
    if (busy >= MOST_BUSY) {
      toast(`${busy} chats are being answered; wait for one of them or stop it.`);
      return false;
    }
    const request = this.request();
    if (!request) return false;
    conversation.turns.push(turn);
    this.place(turn);
    this.follows = true;
    this.scroll();
    const body = () => ({ messages: conversation.messages(turn, request.system), ...request.parameters });
    this.run(conversation, turn, body);
    return true;
  }

  async run(conversation, turn, body) {
    const stopper = new AbortController();
    conversation.stopper = stopper;
    this.onBusy(true);
    this.library.touch(conversation);
    announce('The answer begins.');
    const painter = new Painter(() => {
      turn.view?.paint();
      this.scroll();
      this.library.saveSoon(conversation);
    });
    const watch = setInterval(() => this.watch(turn), 1000);
    try {
      const finish = await answerInRounds(turn, body, stopper.signal, () => painter.plan());
      turn.end(finish === 'length' ? 'cut at the token limit' : '');
      announce(`The answer is complete: ${turn.summary}.`);
    } catch (error) {
      this.fail(turn, error, stopper.signal);
    }
    clearInterval(watch);
    painter.cancel();
    if (conversation.stopper !== stopper) return; // its answer was dropped
    conversation.stopper = null;
    this.library.touch(conversation);
    if (this.current === conversation) this.onBusy(false);
    turn.view?.paint();
    this.scroll();
  }

  fail(turn, error, signal) {
    if (signal.aborted) {
      turn.end('stopped');
      announce('Stopped.');
      return;
    }
    let { message } = error;
    if (error instanceof ConnectionLost) {
      if (!turn.empty) message += ' What had arrived is kept above.';
      this.onLost();
    } else if (error instanceof KeyMissing) {
      message += ' The question was not sent.';
    }
    turn.end('', { message, retry: true });
    announce(message);
  }

  /** A slow network or a full server: say that we still wait. */
  watch(turn) {
    const silent = performance.now() - turn.heardAt;
    const waits = silent >= SILENT_MS;
    if (!waits && !turn.notice) return;
    turn.notice = waits
      ? { message: `Nothing from the server for ${Math.round(silent / 1000)} s. Still waiting; Stop gives up.`, retry: false }
      : null;
    turn.view?.paint();
  }

  scroll() {
    if (this.follows) this.log.scrollTop = this.log.scrollHeight;
  }
}

/** Calls `paint` at most once a frame, and less often where it takes long. */
class Painter {
  constructor(paint) {
    this.paint = paint;
    this.notBefore = 0;
    this.frame = 0;
    this.timer = 0;
  }

  plan() {
    if (this.frame || this.timer) return;
    const wait = this.notBefore - performance.now();
    if (wait > 20) {
      this.timer = setTimeout(() => {
        this.timer = 0;
        this.plan();
      }, wait);
      return;
    }
    this.frame = requestAnimationFrame((began) => {
      const start = Math.max(began, performance.now());
      this.frame = 0;
      this.paint();
      const end = performance.now();
      this.notBefore = end + PAINT_SHARE * (end - start);
    });
  }

  cancel() {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
  }
}
