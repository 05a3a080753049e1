"""The generating routes of vLLM, one value each: what differs between them and nothing else.

``base`` says what a turn must know of a route, in OpenAI's way of speaking; ``chat``,
``completions``, ``messages`` (Anthropic's) and ``responses`` say where they differ. The steps of a
turn ask the dialect and never look at a path.
"""

from proxy.dialects.chat import CHAT
from proxy.dialects.completions import COMPLETIONS
from proxy.dialects.messages import MESSAGES
from proxy.dialects.responses import RESPONSES

DIALECTS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
"""All of them."""
