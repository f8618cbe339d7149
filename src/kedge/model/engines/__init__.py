"""How an encoder is run on a processor, and why that way.

There are several ways: eager torch, the same in channels_last, with batch normalisation folded into the convolutions,
ResNets fused for oneDNN, onnxruntime, and torch's compiler. Which is the fastest depends on the machine. All compute
the same function in float32: a way whose embeddings are further than 1e-4 of their length from eager ones is dropped.
(bfloat16 never passes; it is there for those who ask for it.)

With `auto` nobody waits for a choice:

- From the first picture on, the best of those ways is used that are made in a tenth of a second: as measured on this
  machine, or else fused, folded, eager, the first that fits. So a query from the shell is answered at once, and two
  processes give a picture the same embedding.
- After a minute of work with batches of one kind, all ways are made and measured in turns, in the background: programs
  in a child process, each timed call between two batches of the work. This happens once; the times, and what
  the making took, are remembered for (encoder, image size, batch size, threads, processor, versions).
- onnxruntime and compiled programs take seconds to be made in each process. They are as soon as the pictures so far
  would have saved that time, if they had gone that way: never more than twice the time of the best possible choice.

`Model.tune` measures and makes at once, for those who know that much work is ahead. An encoder that is in training, on
a GPU, hooked, under autocast or not in float32 is run as it is. An engine works with a copy of the weights; before each
batch they are compared with the encoder's (see `Watch`), and when they have changed it is made anew.
"""

from __future__ import annotations

from kedge.model.engines.engines import Engines

__all__ = ["Engines"]
