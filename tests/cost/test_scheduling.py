from meshwright.cost.scheduling import Task, makespan_s, schedule


def test_streams_run_beside_each_other_and_tasks_wait():
    tasks = [
        Task("gather", "link", 2.0),
        Task("compute", "compute", 3.0, (0,)),
        Task("next gather", "link", 4.0),
        Task("next compute", "compute", 1.0, (2,)),
    ]
    events = schedule(tasks)
    assert [(event.start_s, event.end_s) for event in events] == [(0, 2), (2, 5), (2, 6), (6, 7)]
    assert [event.name for event in events if event.critical] == ["gather", "next gather", "next compute"]
    assert makespan_s(tasks) == 7.0


def test_nothing_takes_no_time():
    assert schedule([]) == []
    assert makespan_s([]) == 0.0
