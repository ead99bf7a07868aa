from luffy.api import reward


@reward("exact")
def exact(response, answer, problem):
    """1 where the text after the last #### is the answer, letter by letter."""
    return float(response.split("####")[-1].strip() == answer.strip())
