"""A beam search over HTTP: each step of a beam is a request for one token.

The rules are those of ``LLM.beam_search`` (``penstock.client.beam_search``). The steps of all beams
of all prompts go out together and are waited for; whatever dies meanwhile costs none, since each is
continued as any request is. A step that finds the server full asks again, for a while.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

import msgspec

from penstock.client.answers import FINISH_REASONS, Answer, RequestProgress
from penstock.client.beam_search import Beam, BeamSearch, BeamSearchParams, step_params
from penstock.client.gateway_interface import Gateway, Overloaded
from penstock.client.sink import RowExtras
from penstock.protocol.logprobs import Logprob, unpack
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.tasks import DETOKENIZE
from penstock.protocol.wire.messages.requests import TOKEN_BYTES, Prompt, Rejected, Tokens
from penstock.protocol.wire.messages.tokens import End, EndReason, RowDetails, RowStart, Text
from penstock.services.frontend.errors import ApiError, bad_request, from_rejected, status_error
from penstock.services.frontend.generation import Generation
from penstock.services.frontend.parse import GenerateRequest

STANDSTILL_SECONDS = 30.0
"""A search ends when the server has been too full for its next step for so long."""
LONGEST_PAUSE_SECONDS = 1.0


class _Refused(Exception):
    def __init__(self, rejected: Rejected) -> None:
        super().__init__(rejected.message)
        self.rejected = rejected


class _Step:
    """The sink of one small request; what has come of it is there once ``ended`` is set."""

    def __init__(self, progress: RequestProgress, *, wants_ids: bool) -> None:
        """progress: of the whole search."""
        self._progress = progress
        self.wants_ids = wants_ids
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.prompt_tokens = 0
        self.prompt = b""
        self.start: RowStart | None = None
        self.details: RowDetails | None = None
        self.text = ""

    def on_accepted(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens

    def on_row(self, choice: int, text: str, tokens: int, extras: RowExtras | None = None) -> None:
        self.text += text
        if extras is None or self.ended.done():
            return
        self.start = extras.start or self.start
        self.details = extras.details or self.details
        self.prompt = extras.prompt or self.prompt
        self.text += "".join(one.text for one in extras.events or () if isinstance(one, Text))
        if (end := extras.end) is None:
            return
        if end.reason in FINISH_REASONS:
            self.ended.set_result(None)
            return
        status = end.status if 400 <= end.status < 600 else 500
        self.ended.set_exception(status_error(status, end.message or "The request was aborted"))

    def on_continued(self) -> None:
        self._progress.continuations += 1

    def on_rejected(self, rejected: Rejected) -> None:
        if not self.ended.done():
            self.ended.set_exception(_Refused(rejected))

    def found(self) -> dict[int, Logprob]:
        """The likeliest next tokens by their ids."""
        if self.details is None or self.details.tokens is None:
            raise ApiError(500, "a step of a beam came without logprobs", kind="server_error")
        (token,) = unpack(self.details.tokens)
        return {one.token: one for one in token.top}


class PromptSearch(BeamSearch[Logprob]):
    """The search of one prompt."""

    def __init__(self, prompt: bytes, params: BeamSearchParams, ends: frozenset[int]) -> None:
        """prompt: int32. It may be long, and each step of each beam sends it again, in the thread
        that streams to all clients: so it is copied and never listed."""
        super().__init__(params, ends)
        self.prompt = prompt

    def prompts(self) -> list[Prompt]:
        """What the model is to be asked for one more token of, beam by beam."""
        return [Tokens(self.prompt + _ids(beam.tokens)) for beam in self.running]


class _Search:
    """The search of one client's request."""

    def __init__(
        self, generation: Generation, gateway: Gateway, params: BeamSearchParams, longest: int
    ) -> None:
        self._generation, self._gateway = generation, gateway
        self._request, self._params, self._longest = generation.request, params, longest
        self._went_on_at = generation.now()
        self._began = False

    async def run(self, answers: Sequence[Answer]) -> None:
        """Fill the answers, prompt by prompt. Raises ``ApiError``."""
        searches = await self._begin()
        while running := [search for search in searches if not search.done]:
            beams = [beam for search in running for beam in search.prompts()]
            asked = self._asking(beams, step_params(self._params))
            steps = iter(await self._all(asked))
            for search in running:
                search.advance([next(steps).found() for _ in search.running])
        kept = [search.finished[: self._request.params.n] for search in searches]
        texts = await self._texts([beam for best in kept for beam in best])
        n = self._request.params.n
        for place, (search, best) in enumerate(zip(searches, kept, strict=True)):
            for answer, beam in zip(answers[place * n : (place + 1) * n], best, strict=True):
                self._fill(answer, search.prompt, beam, texts.pop(0))

    async def _begin(self) -> list[PromptSearch]:
        """The first step of all prompts, which are as the client sent them."""
        request, generation = self._request, self._generation
        cut = request.params.truncate_prompt_tokens
        params = msgspec.structs.replace(step_params(self._params), truncate_prompt_tokens=cut)
        searches = []
        for step in await self._all(self._asking(request.prompts, params), wants_ids=True):
            self._check_length(len(step.prompt) // TOKEN_BYTES)
            search = PromptSearch(step.prompt, self._params, frozenset(request.ends))
            search.advance([step.found()])
            searches.append(search)
            generation.on_accepted(step.prompt_tokens)
            if step.start is not None:
                generation.on_start(0, step.start)
        generation.on_first_token(generation.now())
        self._began = True
        return searches

    def _check_length(self, prompt: int) -> None:
        most, room = self._params.max_tokens, self._longest - prompt
        if most > room:
            raise bad_request(
                f"the prompt has {prompt} tokens and max_tokens is {most}, together "
                f"{prompt + most}; the maximum context length is {self._longest} tokens "
                f"(--max-model-len): shorten the prompt or ask for at most {room}",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _asking(self, prompts: Sequence[Prompt], params: SamplingParams) -> GenerateRequest:
        return msgspec.structs.replace(
            self._request, prompts=list(prompts), params=params, beams=None, is_part=True
        )

    async def _texts(self, beams: Sequence[Beam[Logprob]]) -> list[str]:
        """What the tokens of answers say, without the end."""
        said = [beam.tokens[:-1] if beam.ended else beam.tokens for beam in beams]
        skips = SamplingParams(skip_special_tokens=self._request.params.skip_special_tokens)
        asked = self._asking([Tokens(_ids(tokens)) for tokens in said if tokens], skips)
        steps = iter(await self._all(msgspec.structs.replace(asked, task=DETOKENIZE)))
        return [next(steps).text if tokens else "" for tokens in said]

    def _fill(self, answer: Answer, prompt: bytes, beam: Beam[Logprob], text: str) -> None:
        end = End(0, EndReason.STOP if beam.ended else EndReason.LENGTH)
        extras = RowExtras(end=end)
        if self._request.returns_ids:
            extras = RowExtras(end=end, ids=_ids(beam.tokens), prompt=prompt)
        answer.tokens = len(beam.tokens)
        answer.add(text, extras)
        self._generation.on_end(end)

    async def _all(self, asked: GenerateRequest, *, wants_ids: bool = False) -> list[_Step]:
        """What has come of each of the prompts, which are asked for together."""
        places = range(len(asked.prompts))
        tasks = [asyncio.ensure_future(self._ask(asked, one, wants_ids)) for one in places]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _ask(self, asked: GenerateRequest, place: int, wants_ids: bool) -> _Step:
        generation, only = self._generation, range(place, place + 1)
        while True:
            step = _Step(generation, wants_ids=wants_ids)
            age = generation.now() - generation.arrival
            left = max(0.0, generation.timeout_s - age)
            work = asked.work(only, generation.caller, time_left=left, age=age)
            try:
                await self._opened(self._gateway.open(work, step), step)
            except (Overloaded, _Refused) as refusal:
                await self._pause(refusal.rejected)
                continue
            self._went_on_at = generation.now()
            generation.usage.completion += asked.task != DETOKENIZE
            return step

    async def _opened(self, number: int, step: _Step) -> None:
        try:
            await step.ended
        except asyncio.CancelledError:
            self._gateway.cancel(number)
            raise

    async def _pause(self, rejected: Rejected) -> None:
        """Wait until it makes sense to ask again. Raises ``ApiError`` where it does not."""
        stands_still = self._generation.now() - self._went_on_at > STANDSTILL_SECONDS
        if not self._began or stands_still or rejected.status not in (429, 503):
            self._generation.meters.refused(rejected)
            raise from_rejected(rejected)
        await asyncio.sleep(min(rejected.retry_after or LONGEST_PAUSE_SECONDS, 1.0))


def _ids(tokens: Sequence[int]) -> bytes:
    """As int32."""
    return array("i", tokens).tobytes()


async def search_beams(generation: Generation, gateway: Gateway, answers: Sequence[Answer]) -> None:
    """Find the answers of a request with beams. What is wrong ends up in ``generation.error``;
    whoever stops waiting, or a deadline that passes, cancels what is under way."""
    request = generation.request
    if request.beams is None:
        raise ValueError("a request without beams cannot be searched for")
    await generation.enter(answers)
    model = next((one for one in gateway.models() if one.name == request.served), None)
    longest = 0 if model is None else model.max_model_len
    search = _Search(generation, gateway, request.beams, longest)
    searching = asyncio.ensure_future(search.run(answers))
    try:
        await asyncio.wait({searching, generation.finished}, return_when=asyncio.FIRST_COMPLETED)
        if searching.done():
            searching.result()
    except ApiError as error:
        generation.fail(error)
    finally:
        searching.cancel()
