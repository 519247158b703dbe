"""The pair `smol`: SmolLM2-135M-Instruct taught to reason in steps, and a draft cut from it."""
